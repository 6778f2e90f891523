"""The image recipe: under ZeRO 1 with EMA and label smoothing it reaches what plain Composer reaches."""

from __future__ import annotations

import pytest
import torch
from composer.algorithms import EMA, LabelSmoothing

from composer_ds.errors import ConfigError
from recipes.image_classification import DataConfig, ModelConfig, build
from tests.recipes.recipes_on_ranks import classify_images


def test_without_scikit_learn_it_tells_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__('sys').modules, 'sklearn.datasets', None)
    with pytest.raises(ConfigError, match='pip install scikit-learn'):
        build(ModelConfig(), DataConfig())


class TestWithImages:
    @pytest.fixture(autouse=True)
    def _images(self):
        pytest.importorskip('sklearn', reason='scikit-learn ships the images')

    @pytest.mark.slow
    def test_zero_1_reaches_the_accuracy_of_plain_composer(self, two_ranks):
        plain, _ = two_ranks.run(classify_images, None)
        results = two_ranks.run(classify_images, 1)
        start = build(ModelConfig(width=8), DataConfig()).model.state_dict()
        assert plain['metrics']['MulticlassAccuracy'] > 0.9  # of 10 classes
        for result in results:
            # 359 images: two of them are 0.0056.
            assert result['metrics'] == pytest.approx(plain['metrics'], abs=0.006)
        weights = results[0]['weights']  # of rank 0, as in plain Composer: each rank's BatchNorm has seen other images
        assert {name.rpartition('.')[2] for name in weights} >= {'running_mean', 'running_var', 'num_batches_tracked'}
        for name, tensor in plain['weights'].items():
            assert not torch.equal(weights[name], start[name]), f'{name} did not move'
            torch.testing.assert_close(weights[name], tensor, atol=1e-3, rtol=1e-3, msg=name)

    def test_what_the_yaml_asks_for_is_built(self):
        task = build(ModelConfig(ema_half_life='7ba', label_smoothing=0.25), DataConfig(test_fraction=0.5))
        smoothing, ema = task.algorithms
        assert isinstance(smoothing, LabelSmoothing) and smoothing.smoothing == 0.25
        assert isinstance(ema, EMA) and ema.smoothing == pytest.approx(2 ** (-1 / 7))
        assert build(ModelConfig(ema_half_life=None, label_smoothing=0), DataConfig()).algorithms == []

    def test_test_images_are_not_trained_on(self):
        task = build(ModelConfig(), DataConfig())
        train, test = (
            {(image.numpy().tobytes(), int(digit)) for image, digit in loader.dataset}  # pyright: ignore
            for loader in (task.train_dataloader.dataloader, task.eval_dataloader[0].dataloader.dataloader)
        )
        assert not train & test
        assert (len(train), len(test)) == (1797 - 359, 359)

    def test_all_problems_of_the_data_are_raised_at_once(self, monkeypatch):
        monkeypatch.setenv('WORLD_SIZE', '3')
        with pytest.raises(ConfigError) as raised:
            build(ModelConfig(), DataConfig(global_batch_size=64, test_fraction=0.0005))
        batch, test = raised.value.problems
        assert 'data.global_batch_size is 64' in batch and 'test split has fewer samples (1)' in test
