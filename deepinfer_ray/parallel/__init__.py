"""Everything that involves more than one rank, without Ray."""
