"""The mT5 recipe on one process under plain Composer: it builds, trains, generates, reports and is saved whole."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.models import HuggingFaceModel
from pydantic import BaseModel, ValidationError
from torch.utils.data.distributed import DistributedSampler
from transformers import MT5ForConditionalGeneration

from composer_ds.errors import ConfigError
from recipes.dataloaders import build_dataloader
from recipes.g2p_model import G2PModel
from recipes.mt5 import DataConfig, ModelConfig, build
from recipes.task import Task
from tests.recipes.g2p_oracle import expected_rates, greedy_prediction
from tests.recipes.tiny_mt5 import (
    TINY,
    Watch,
    build_tiny,
    dataloader_of,
    held_out,
    model_of,
    trainer_of,
)


@pytest.fixture(scope='module')
def task() -> Task:
    return build_tiny()


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> tuple[Trainer, Path, list[float]]:
    """A trainer after two epochs, with its checkpoint and the loss at the end of each batch."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp('checkpoints')
    watch = Watch()
    trainer = trainer_of(build_tiny(), watch, max_duration='2ep', save_folder=str(folder), eval_interval='1ep', seed=1)
    trainer.fit()
    return trainer, folder, watch.losses


class TestBuild:
    def test_held_out_words_are_not_trained_on(self, task):
        trained = {spelling for spelling, _ in dataloader_of(task.train_dataloader).dataset}
        validation, test = ({word.spelling for word in held_out(task.eval_dataloader, split)} for split in (0, 1))
        assert (len(trained), len(validation), len(test)) == (200, 41, 41)
        assert not trained & validation and not trained & test and not validation & test

    def test_the_same_weights_every_time_whatever_the_random_state(self, task):
        torch.manual_seed(123)
        before = torch.get_rng_state()
        again = build_tiny().model
        assert torch.equal(torch.get_rng_state(), before)
        assert all(map(torch.equal, task.model.state_dict().values(), again.state_dict().values()))
        other = build(ModelConfig(**TINY, seed=18), DataConfig(max_words=16, global_batch_size=16)).model
        assert not torch.equal(other.state_dict()['model.shared.weight'], again.state_dict()['model.shared.weight'])

    def test_sizes_are_those_asked_for(self, task):
        model = model_of(task)
        assert isinstance(task.model, HuggingFaceModel)
        assert isinstance(model.model, MT5ForConditionalGeneration)
        assert {name: getattr(model.config, name) for name in TINY} == TINY
        assert model.config.vocab_size == len(model.tokenizer or ()) == 3 + 29 + 39
        assert model.max_new_tokens == 28 + 1  # the longest pronunciation has 28 phonemes, and an end

    def test_stress_gives_more_phonemes(self):
        stressed = build_tiny(keep_stress=True)
        assert len(model_of(stressed).tokenizer or ()) == 3 + 29 + 69
        assert any(
            '1' in pronunciation
            for word in held_out(stressed.eval_dataloader, 1)
            for pronunciation in word.pronunciations
        )

    def test_unknown_keys_and_impossible_sizes_are_refused(self):
        cases: list[tuple[type[BaseModel], dict[str, Any]]] = [
            (ModelConfig, {'d_modell': 1}),
            (ModelConfig, {'num_heads': 0}),
            (ModelConfig, {'dropout_rate': 1.0}),
            (DataConfig, {'global_batch': 1}),
            (DataConfig, {'test_fraction': 0.0}),
            (DataConfig, {'max_words': 0}),
        ]
        for config, settings in cases:
            with pytest.raises(ValidationError, match=next(iter(settings))):
                config(**settings)

    def test_all_problems_of_the_data_are_raised_at_once(self, monkeypatch):
        monkeypatch.setenv('WORLD_SIZE', '3')
        with pytest.raises(ConfigError) as raised:
            build_tiny(global_batch_size=256, max_words=1, eval_max_words=2)
        batch, train, validation, test = raised.value.problems
        assert 'data.global_batch_size is 256' in batch and '255 or 258' in batch
        assert 'train split' in train and 'data.max_words' in train
        assert 'validation split has fewer samples (2) than there are ranks (3)' in validation
        assert 'test split' in test

    def test_a_global_batch_smaller_than_the_world_size_names_the_one_valid_size(self, monkeypatch):
        monkeypatch.setenv('WORLD_SIZE', '8')
        with pytest.raises(ConfigError, match='Write 8, or launch'):
            build_tiny(global_batch_size=3)

    def test_an_empty_split_is_refused(self):
        with pytest.raises(ConfigError, match='train split is empty'):
            build_tiny(test_fraction=0.9, validation_fraction=0.2)


class TestWorldSize:
    @pytest.mark.parametrize('epoch', [0, 1])
    def test_optimizer_steps_take_the_same_samples_at_every_world_size(self, monkeypatch, epoch):
        def steps(world_size: int) -> list[list[int]]:
            per_rank = []
            for rank in range(world_size):
                monkeypatch.setenv('WORLD_SIZE', str(world_size))
                monkeypatch.setenv('RANK', str(rank))
                spec = build_dataloader(
                    range(1000), lambda samples: {'x': samples}, batch_size=64 // world_size, shuffle_seed=17
                )
                sampler = dataloader_of(spec).sampler
                assert isinstance(sampler, DistributedSampler)
                sampler.set_epoch(epoch)  # as the Trainer does
                per_rank.append([batch['x'] for batch in spec.dataloader])
            assert len({len(batches) for batches in per_rank}) == 1
            return [sorted(chain.from_iterable(batches)) for batches in zip(*per_rank, strict=True)]

        alone = steps(1)
        assert len(alone) == 16 and len(alone[-1]) == 1000 - 15 * 64
        assert sorted(chain.from_iterable(alone)) == list(range(1000))
        assert steps(2) == steps(4) == steps(8) == alone

    def test_another_seed_gives_another_order(self):
        first, second = (
            next(iter(build_dataloader(range(99), lambda x: {'x': x}, batch_size=9, shuffle_seed=seed).dataloader))
            for seed in (1, 2)
        )
        assert first != second


class TestTraining:
    def test_every_parameter_moves_and_the_loss_falls(self, task, trained):
        trainer, _, losses = trained
        before = dict(task.model.named_parameters())
        for name, parameter in trainer.state.model.named_parameters():
            assert not torch.equal(parameter, before[name]), name
        assert len(losses) == 2 * 14  # 215 samples or so of 200 words, in batches of 16, the last one short
        assert losses[-1] < 0.7 * losses[0]

    def test_metrics_are_those_of_the_generated_words(self, trained):
        trainer, _, _ = trained
        for split, label in enumerate(('validation', 'test')):
            words = held_out(trainer.state.evaluators, split)
            predictions = [greedy_prediction(trainer.state.model, word.spelling) for word in words]
            expected = expected_rates(predictions, [list(word.pronunciations) for word in words])
            metrics = trainer.state.eval_metrics[label]
            reached = (float(metrics['PhonemeErrorRate'].compute()), float(metrics['WordErrorRate'].compute()))
            assert reached == pytest.approx(expected, rel=1e-6)

    def test_a_checkpoint_holds_model_and_tokenizer(self, trained, tmp_path, monkeypatch):
        trainer, folder, _ = trained
        monkeypatch.chdir(tmp_path)  # Composer leaves the tokenizer's files in the working directory
        checkpoint = folder / 'ep2-ba28-rank0.pt'
        network, tokenizer = HuggingFaceModel.hf_from_composer_checkpoint(str(checkpoint))
        state = torch.load(checkpoint, weights_only=False)['state']['model']
        network.load_state_dict({name.removeprefix('model.'): tensor for name, tensor in state.items()})
        assert tokenizer is not None
        assert tokenizer('K AE ?') == trainer.state.model.tokenizer('K AE ?')
        again = G2PModel(network, tokenizer, max_new_tokens=29)
        for spelling in ('cat', 'thinkers', "o'neill"):
            assert greedy_prediction(again, spelling) == greedy_prediction(trainer.state.model, spelling)

    def test_resuming_gives_the_weights_of_an_uninterrupted_run(self, trained):
        trainer, folder, _ = trained
        resumed = trainer_of(build_tiny(), max_duration='2ep', load_path=str(folder / 'ep1-ba14-rank0.pt'), seed=1)
        resumed.fit()
        for name, tensor in resumed.state.model.state_dict().items():
            torch.testing.assert_close(tensor, trainer.state.model.state_dict()[name], msg=name)


class TestReport:
    def test_the_report_tells_what_was_evaluated(self, capsys):
        task = build_tiny()
        trainer = trainer_of(task, max_duration='1ba', eval_interval='1ba')
        trainer.fit()
        printed = ' '.join(capsys.readouterr().out.split())
        metrics = trainer.state.eval_metrics['test']
        per, wer = (float(metrics[name].compute()) for name in ('PhonemeErrorRate', 'WordErrorRate'))
        assert f'On 41 of the 12,701 test words, none of them seen in training: PER {per:.4f}, WER {wer:.4f}' in printed
        for word in held_out(task.eval_dataloader, 1)[:10]:
            assert f' {word.spelling} ' in printed
        # once, although validation words were evaluated, too
        assert printed.count('test words') == 2  # the title and the line below

    def test_test_words_are_evaluated_after_training_only(self):
        watch = Watch()
        trainer_of(build_tiny(), watch, max_duration='4ba', eval_interval='1ba').fit()
        assert watch.evaluations == ['validation'] * 4 + ['test']


class TestGeneration:
    def test_predictions_end_at_the_end_token_and_hold_phonemes_only(self, task):
        batch = next(iter(dataloader_of(task.eval_dataloader[0].dataloader)))
        predictions = model_of(task).eval_forward(batch)
        assert len(predictions) == 16
        assert all(not {*prediction} & {'<', '>', '/'} for prediction in predictions)
        assert all(len(prediction.split()) <= 29 for prediction in predictions)

    def test_padding_changes_nothing(self, task):
        batch = next(iter(dataloader_of(task.eval_dataloader[0].dataloader)))
        alone = [greedy_prediction(model_of(task), spelling) for spelling in batch['spellings']]
        assert model_of(task).eval_forward(batch) == alone
