"""Configurations and their rules. Imported by every package, imports none of them."""
