"""Triton kernels for a decode step. Import this where CUDA is to be used: importing it imports triton.

``kernels``: what lies between the matrix products. ``attention``: rope, cache write and attention in one kernel.
``gemv``: products with one row. ``launch``: the same as functions of tensors. Meaning: see ops/reference.py.
"""
