"""Measurements that the README and the results files quote; each is a function that returns plain rows."""
