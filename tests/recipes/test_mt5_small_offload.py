"""yamls/mt5_small_offload.yaml on a CPU, with a smaller model in a folder in place of google/mt5-small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MT5Config, MT5ForConditionalGeneration

from recipes.cmudict_data import phonemes
from recipes.g2p_tokenizer import g2p_tokenizer
from tests.recipes.recipes_on_ranks import run_yaml
from tests.recipes.tiny_mt5 import TINY

YAML = Path(__file__).parents[2] / 'yamls' / 'mt5_small_offload.yaml'
# Three optimizer steps of a warm-up of 1000: with lr 0.3 they are made with 0, 3e-4 and 6e-4.
SMALL = (
    'data.max_words=250', 'data.eval_max_words=4', 'optimizer.lr=0.3', 'train.max_duration=3ba', 'train.device=cpu',
    'train.precision=fp32', 'train.eval_interval=0', 'train.progress_bar=false', 'loggers.wandb=false',
    'checkpoint.save_folder=null',
)  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    tokenizer = g2p_tokenizer(phonemes())
    torch.manual_seed(99)
    sizes: dict[str, Any] = {**TINY, 'vocab_size': len(tokenizer), 'dropout_rate': 0.0}
    MT5ForConditionalGeneration(MT5Config(**sizes)).save_pretrained(tmp_path / 'model')
    tokenizer.save_pretrained(tmp_path / 'model')
    return tmp_path


@pytest.mark.slow
def test_64_microbatches_of_one_train_as_plain_composer_with_whole_batches(one_rank, folder):
    def run(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        saver = f'callbacks.consolidated_weights_saver={{folder: {folder}, filename: {name}, interval: 1dur}}'
        one_rank.run(run_yaml, str(YAML), f'model.pretrained={folder / "model"}', saver, *SMALL, *overrides)
        return weights_of(folder / name)

    start = weights_of(folder / 'model')
    # Without clipping, which scales the gradients of each optimizer step in its own way, so that moments differ.
    offloaded = run('offloaded', 'deepspeed.ds_config.gradient_clipping=0.0')
    without = ('deepspeed=null', 'train.device_train_microbatch_size=null', 'callbacks.deepspeed_monitor=false')
    plain = run('plain', *without)
    for name, tensor in plain.items():
        moved = tensor - start[name]
        assert moved.abs().max() > 1e-4, f'{name} did not move'
        # What is compared is the update and not the weight, which hardly moves.
        difference = (offloaded[name] - start[name] - moved).norm() / moved.norm()
        assert difference < 0.02, (name, float(difference))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(MT5ForConditionalGeneration.from_pretrained(folder, dtype='float32').state_dict())
