"""Transforms: rows and batches on their way to a step.

How rows of unequal length become a batch, how images are normalized, and how several loaders are read together.

In reading order: `padding` (`pad`, a collate function with a mask), `bucketing` (`bucketed`, batches of rows of
neighboring lengths), `normalize` (`Normalize`, a layer for images on the device), `zipped` (`together`, a zip of
loaders).

Promises: orders are functions of (seed, epoch), on any number of ranks; padding is marked, never counted; every loader
of a zip resumes in the middle of its pass, and the shorter ones continue where they stopped.
"""
