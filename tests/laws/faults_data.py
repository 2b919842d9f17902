"""Faults of data in memory: each function plants one in the library, by a monkeypatch."""

from __future__ import annotations

import torch
from torch.utils.data import RandomSampler

from trainwright.data.dataloader import recognized

from .same_data import ROWS


def skips_the_base_seed(patch):
    whole = recognized.from_memory

    def unseeded(loader, iterator):
        generator = torch.default_generator if loader.generator is None else loader.generator
        generator.set_state(unseeded.before if loader.generator is None else unseeded.own)
        return whole(loader, iterator)

    begin = torch.utils.data.dataloader._SingleProcessDataLoaderIter.__init__

    def noted(self, loader):
        unseeded.before = torch.get_rng_state()
        unseeded.own = None if loader.generator is None else loader.generator.get_state()
        begin(self, loader)

    patch.setattr(torch.utils.data.dataloader._SingleProcessDataLoaderIter, "__init__", noted)
    patch.setattr(recognized, "from_memory", unseeded)


def draws_an_order_of_its_own(patch):
    drawn = recognized._drawn
    recognized._draws_alike(RandomSampler)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(9))
    patch.setattr(recognized, "_drawn", lambda sampler: drawn(sampler)._replace(order=order))


def gives_the_rows_of_a_batch_in_another_order(patch):
    take, whole = recognized.Table.take, recognized.Table.batches
    patch.setattr(recognized.Table, "take", lambda self, rows: take(self, rows.sort().values))

    def batches(self, order, size, rows, *, only=None):
        flipped = None if order is None else torch.cat([part.flip(0) for part in order.split(size)])
        return whole(self, flipped, size, rows, only=only)

    patch.setattr(recognized.Table, "batches", batches)


def forgets_what_is_drawn_at_the_end(patch):
    recognized._draws_alike(RandomSampler)
    drawn = recognized._drawn
    patch.setattr(recognized, "_drawn", lambda sampler: drawn(sampler)._replace(generator=None))


def gives_tuples(patch):
    whole = recognized.Table.__init__
    patch.setattr(recognized.Table, "__init__", lambda self, columns, pack, at=None: whole(self, columns, None, at))


def leaves_out_the_short_batch(patch):
    passed = recognized._passed
    patch.setattr(recognized, "_passed", lambda table, given: list(passed(table, given))[:1])


def gathers_a_row_late(patch):
    whole = recognized.Table._gathered_at_once

    def late(table, order, size, rows):
        return whole(table, order.roll(1), size, rows)

    patch.setattr(recognized.Table, "_gathered_at_once", late)
