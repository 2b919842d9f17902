"""Transforms: what is made of rows and batches on their way to a step.

They answer how rows of unequal length become a batch, how images are normalized, and how several loaders are read in
step. In reading order: padding.py (`pad`, a collate function with a mask), bucketing.py (`bucketed`, batches of rows of
neighboring lengths), normalize.py (`Normalize`, a layer for images on the device), zipped.py (`together`, a zip of
loaders).

Orders are functions of (seed, epoch), on any number of ranks; every loader of a zip resumes in the middle of its pass.
"""
