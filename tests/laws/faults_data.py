"""Faults of data in memory: each function plants one in the library, by a monkeypatch."""

from __future__ import annotations

import torch
from torch.utils.data import RandomSampler

from trainwright.data.dataloader import tensor_dataset

from .same_data import ROWS


def skips_the_base_seed(patch):
    whole = tensor_dataset.index_select_batches

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
    patch.setattr(tensor_dataset, "index_select_batches", unseeded)


def draws_an_order_of_its_own(patch):
    drawn = tensor_dataset._draw_order
    tensor_dataset._draws_like_torch(RandomSampler)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(9))
    patch.setattr(tensor_dataset, "_draw_order", lambda sampler: drawn(sampler)._replace(order=order))


def gives_the_rows_of_a_batch_in_another_order(patch):
    take, whole = tensor_dataset.Table.take, tensor_dataset.Table.batches
    patch.setattr(tensor_dataset.Table, "take", lambda self, rows: take(self, rows.sort().values))

    def batches(self, order, size, rows, *, only=None):
        flipped = None if order is None else torch.cat([part.flip(0) for part in order.split(size)])
        return whole(self, flipped, size, rows, only=only)

    patch.setattr(tensor_dataset.Table, "batches", batches)


def forgets_what_is_drawn_at_the_end(patch):
    tensor_dataset._draws_like_torch(RandomSampler)
    drawn = tensor_dataset._draw_order
    patch.setattr(tensor_dataset, "_draw_order", lambda sampler: drawn(sampler)._replace(generator=None))


def gives_tuples(patch):
    whole = tensor_dataset.Table.__init__
    patch.setattr(tensor_dataset.Table, "__init__", lambda self, columns, pack, at=None: whole(self, columns, None, at))


def leaves_out_the_short_batch(patch):
    passed = tensor_dataset._replay_pass
    patch.setattr(tensor_dataset, "_replay_pass", lambda table, given: list(passed(table, given))[:1])


def gathers_a_row_late(patch):
    whole = tensor_dataset.Table._gathered_at_once

    def late(table, order, size, rows):
        return whole(table, order.roll(1), size, rows)

    patch.setattr(tensor_dataset.Table, "_gathered_at_once", late)
