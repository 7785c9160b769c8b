"""DeepSeek-V4.1 as modules over `ops`: the text stack, its weights and its checkpoint.

Knows: the architecture, rounding points, which caches a layer touches. Does not know: requests, scheduling.
"""
