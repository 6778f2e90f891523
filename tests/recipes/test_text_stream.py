"""Batches of mosaicml-streaming, which cannot be installed beside transformers 5 without overrides: `make newest`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from composer_ds.errors import ConfigError
from recipes.gpt import DataConfig, ModelConfig, build
from recipes.packed_text import read_paragraphs
from tests.recipes.recipes_on_ranks import TINY_GPT, train_gpt_from_stream

with_streaming = pytest.mark.skipif(
    importlib.util.find_spec('streaming') is None, reason='mosaicml-streaming is not installed'
)


@pytest.fixture(scope='module')
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('text') / 'text.txt'
    path.write_text('\n\n'.join(read_paragraphs(None)[:150]))
    return path


@pytest.fixture(scope='module')
def stream(text) -> str:
    """Written by the command."""
    from recipes.text_stream import main

    app, folder = typer.Typer(), text.with_name('stream')
    app.command()(main)
    result = CliRunner().invoke(app, [str(text), str(folder), '--sequence-length', '64'])
    assert result.exit_code == 0 and f'{folder}/validation: ' in result.output, result.output
    return str(folder)


@with_streaming
def test_a_stream_has_the_sequences_of_the_text(text, stream):
    streamed, read = (
        build(ModelConfig(**TINY_GPT), DataConfig(path=path, stream=folder, sequence_length=64, global_batch_size=12))
        for path, folder in ((None, stream), (str(text), None))
    )
    dataset, expected = _dataset(streamed.train_dataloader), _dataset(read.train_dataloader)
    assert sorted(dataset[at] for at in range(dataset.num_samples)) == sorted(expected)
    assert all(isinstance(token, int) for token in dataset[0][0])
    held_out, expected = (_dataset(task.eval_dataloader[0].dataloader) for task in (streamed, read))
    assert list(held_out) == expected


def _dataset(spec: Any) -> Any:
    return spec.dataloader.dataset


@with_streaming
def test_a_checkpoint_of_two_ranks_goes_on_at_its_position_on_one(one_rank, two_ranks, stream, tmp_path):
    (whole,) = one_rank.run(train_gpt_from_stream, stream, None, max_duration='6ba', eval_interval='6ba')
    for half in two_ranks.run(
        train_gpt_from_stream, stream, 3, max_duration='3ba', eval_interval=0, device_train_microbatch_size=2,
        save_folder=str(tmp_path), save_interval='3ba',
    ):  # fmt: skip
        assert any(not torch.equal(half['weights'][name], tensor) for name, tensor in whole['weights'].items())
    (resumed,) = one_rank.run(
        train_gpt_from_stream,
        stream,
        2,
        max_duration='6ba',
        eval_interval='6ba',
        load_path=f'{tmp_path}/latest-rank0.pt',
    )
    start = build(ModelConfig(**TINY_GPT), DataConfig(max_paragraphs=50)).model.state_dict()
    for name, tensor in whole['weights'].items():
        assert not torch.equal(tensor, start[name]), f'{name} did not move'
        torch.testing.assert_close(resumed['weights'][name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    assert resumed['metrics'] == pytest.approx(whole['metrics'], rel=1e-4)


@with_streaming
@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        ({'sequence_length': 32}, r'data.sequence_length is 32.*packed to 64 tokens. Write data.sequence_length=64'),
        ({'path': 'text.txt', 'max_paragraphs': 3}, r'(?s)data.path is .*data.max_paragraphs is 3'),
        ({'stream': 'nowhere'}, r'no file train/index.json. Write the stream with: python -m recipes.text_stream'),
        ({'stream': 's3://bucket/stream'}, r'Write data.stream_cache=FOLDER'),
    ],
)
def test_what_does_not_fit_is_refused(stream, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(ModelConfig(), DataConfig(**{'stream': stream, 'sequence_length': 64, **settings}))


@pytest.mark.skipif(importlib.util.find_spec('streaming') is not None, reason='mosaicml-streaming is installed')
def test_a_missing_package_is_named():
    with pytest.raises(ConfigError, match=r'data.stream needs mosaicml-streaming .*docs/recipes.md'):
        build(ModelConfig(), DataConfig(stream='stream'))
