"""Transforms of rows and batches: padding, batches by length, normalization of images, and zips of loaders.

Files in reading order:
`padding.py`: `pad`, a collate function with a mask. `bucketing.py`: `bucketed`, batches of rows of similar length.
`normalize.py`: `Normalize`, a layer for images on the device. `zipped.py`: `together`, a zip of loaders.

Promises: orders depend on (seed, epoch) only, on any number of ranks. Padding is marked and not counted. Every loader
of a zip resumes inside its pass, and shorter loaders continue where they stopped.
"""
