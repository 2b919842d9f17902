"""The page that answers a search holds all words of the query: the search of the site finds no page otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
ANSWERS = {
    "resume mid-epoch": "guides/checkpoints",
    "resume in the middle of an epoch": "guides/checkpoints",
    "resume after a crash": "guides/checkpoints",
    "save a checkpoint every n steps": "guides/checkpoints",
    "layer-wise learning rates": "guides/optimizers",
    "discriminative learning rates": "guides/optimizers",
    "differential learning rates": "guides/optimizers",
    "different learning rates per layer": "guides/optimizers",
    "Weights & Biases W&B": "guides/observers",
    "wandb logger": "guides/observers",
    "MLflow logger": "guides/observers",
    "callback": "guides/observers",
    "tqdm progress bar": "guides/observers",
    "gradient accumulation with unequal batches": "guides/accumulation",
    "AUC on the validation set": "guides/metrics",
    "F1 score on the validation set": "guides/metrics",
    "AUC validation set": "cookbook/sklearn_metric",
    "early stopping keeps the best weights": "guides/early_stopping",
    "warmup_steps": "guides/schedules",
    "linear warmup steps": "guides/schedules",
    "warmup ratio": "guides/schedules",
    "DataLoader reproducible order seed": "guides/data_loading",
    "learning-rate finder": "guides/techniques/learning_rate_range_test",
    "LR finder": "guides/techniques/learning_rate_range_test",
    "GAN with several optimizers": "guides/custom_updates",
    "multi-GPU training": "guides/distributed",
    "distributed data parallel": "guides/distributed",
    "inference predict": "guides/evaluation",
    "validation every n steps": "guides/evaluation",
    "transfer learning": "guides/techniques/fine_tuning",
    "transfer learning freeze backbone": "guides/freezing",
    "hyperparameter search": "guides/model_selection",
    "reproducible seed": "cookbook/reproducible",
    "custom training step": "guides/hooks",
    "warmup_ratio of transformers": "coming_from/transformers",
    "num_items_in_batch accumulation": "coming_from/transformers",
    "Lightning EarlyStopping restore_best": "coming_from/lightning",
}


def words(text: str) -> set[str]:
    """Return the words of a text in lower case; a hyphen separates two words."""
    return set(re.findall(r"\w+", text.lower()))


@pytest.mark.parametrize("query", ANSWERS)
def test_a_page_holds_all_words_of_the_query_that_it_answers(query: str) -> None:
    page = (DOCS / f"{ANSWERS[query]}.md").read_text(encoding="utf-8")
    assert words(query) - words(page) == set()
