"""TileLang kernels, a file an operation; installed as `deepinfer_ray.kernels`.

A kernel file states the reference in `deepinfer_ray.ops` that it must agree with, the shapes and layouts it
takes, and the architectures it is compiled for (sm_90a, sm_100a). Until an operation has its kernel, every
backend runs the torch reference.
"""
