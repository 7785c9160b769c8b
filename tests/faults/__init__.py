"""Real deaths on machines that are not real; a package, so that its one cluster ends with its last test."""
