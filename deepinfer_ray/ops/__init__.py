"""The model's hot operations as pure tensor functions: each file is one noun, each function one formula.

Knows: torch and number formats. Does not know: modules, caches, requests. Every function is independent of
how many rows a call has (model spec §9.4) and differentiable where its inputs are.
"""
