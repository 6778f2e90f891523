"""``'auto'``; the oracles are Hugging Face's own integration (transformers) and DeepSpeed."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from composer_ds.auto_values import (
    LEAVE_OUT,
    UNDERSTOOD,
    hidden_size_of,
    leftover_autos,
    model_values,
    resolve_auto,
)
from composer_ds.ds_keys import problems_of_keys, valid_keys

deepspeed = pytest.importorskip('deepspeed')
transformers = pytest.importorskip('transformers')

SIZES = ('reduce_bucket_size', 'stage3_prefetch_bucket_size', 'stage3_param_persistence_threshold')

# The shape of the configs in Hugging Face's documentation of its Trainer.
COMMON: dict[str, Any] = {
    'fp16': {'enabled': 'auto', 'loss_scale': 0, 'loss_scale_window': 1000, 'hysteresis': 2, 'min_loss_scale': 1},
    'bf16': {'enabled': 'auto'},
    'optimizer': {'type': 'AdamW', 'params': {'lr': 'auto', 'betas': 'auto', 'eps': 'auto', 'weight_decay': 'auto'}},
    'scheduler': {
        'type': 'WarmupDecayLR',
        'params': dict.fromkeys(('warmup_min_lr', 'warmup_max_lr', 'warmup_num_steps', 'total_num_steps'), 'auto'),
    },
    'gradient_accumulation_steps': 'auto',
    'gradient_clipping': 'auto',
    'steps_per_print': 2000,
    'train_batch_size': 'auto',
    'train_micro_batch_size_per_gpu': 'auto',
    'wall_clock_breakdown': False,
}
ZERO_2 = {
    **COMMON,
    'zero_optimization': {
        'stage': 2,
        'offload_optimizer': {'device': 'cpu', 'pin_memory': True},
        'allgather_partitions': True,
        'allgather_bucket_size': 2e8,
        'overlap_comm': True,
        'reduce_scatter': True,
        'reduce_bucket_size': 'auto',
        'contiguous_gradients': True,
        'round_robin_gradients': True,
    },
}
ZERO_3 = {
    **COMMON,
    'zero_optimization': {
        'stage': 3,
        'offload_optimizer': {'device': 'cpu', 'pin_memory': True},
        'offload_param': {'device': 'cpu', 'pin_memory': True},
        'overlap_comm': True,
        'contiguous_gradients': True,
        'sub_group_size': 1e9,
        **dict.fromkeys(SIZES, 'auto'),
        'stage3_max_live_parameters': 1e9,
        'stage3_max_reuse_distance': 1e9,
        'stage3_gather_16bit_weights_on_model_save': True,
    },
}
TRAINER = {
    'train_batch_size': 8,
    'train_micro_batch_size_per_gpu': 4,
    'gradient_accumulation_steps': 2,
    'gradient_clipping': 0.5,
    'fp16.enabled': False,
    'bf16.enabled': True,
    'optimizer.params.lr': 0.01,
    'optimizer.params.betas': (0.8, 0.9),
    'optimizer.params.eps': 1e-7,
    'optimizer.params.weight_decay': LEAVE_OUT,
    **{f'scheduler.params.{key}': 3 for key in COMMON['scheduler']['params']},
}


@pytest.mark.parametrize('config', [ZERO_2, ZERO_3], ids=['zero2', 'zero3'])
def test_configs_of_hugging_face(config: dict):
    assert list(problems_of_keys(config)) == []
    before = copy.deepcopy(config)
    resolved, values = resolve_auto(config, {**TRAINER, **model_values(64, 10**6)})
    assert config == before
    assert list(leftover_autos(resolved)) == [] and list(problems_of_keys(resolved)) == []
    read = deepspeed.DeepSpeedConfig(resolved)
    assert (read.train_batch_size, read.gradient_accumulation_steps, read.gradient_clipping) == (8, 2, 0.5)
    assert read.bfloat16_config.enabled and not read.float16_config.enabled
    assert read.optimizer_params == {'lr': 0.01, 'betas': (0.8, 0.9), 'eps': 1e-7}
    assert read.zero_config.reduce_bucket_size == 64 * 64
    if config is ZERO_3:
        assert (read.zero_config.prefetch_bucket_size, read.zero_config.param_persistence_threshold) == (3686, 640)
    assert values['optimizer.params.weight_decay'] is LEAVE_OUT and values['fp16.enabled'] is False
    assert 'steps_per_print' not in values
    assert len(values) == str(config).count("'auto'")


class FromHuggingFace(transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig):
    """Hugging Face's own code for 'auto', on what it takes from accelerate, which is not installed."""

    def __init__(self, config: dict):
        self.config, self.mismatches = config, []

    def find_config_node(self, path: str) -> tuple[Any, str]:
        *above, last = path.split('.')
        node: Any = self.config
        for key in above:
            node = node.get(key) if node is not None else None
        return node, last

    def get_value(self, path: str) -> Any:
        node, last = self.find_config_node(path)
        return None if node is None else node.get(last)

    def is_zero3(self) -> bool:
        return self.get_value('zero_optimization.stage') == 3


def as_hugging_face_resolves(config: dict, model: Any) -> dict:
    filled = FromHuggingFace(copy.deepcopy(config))
    filled.trainer_config_finalize(SimpleNamespace(get_warmup_steps=lambda total: total // 2), model, 6)
    return filled.config


@settings(deadline=None)
@given(st.integers(1, 20_000))
@example(1)
@example(12_288)
def test_sizes_are_hugging_faces(hidden_size: int):
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=hidden_size))
    theirs = as_hugging_face_resolves(ZERO_3, model)
    ours, _ = resolve_auto(ZERO_3, model_values(hidden_size, trained_elements=10**12))
    assert ours['zero_optimization'] == theirs['zero_optimization']


@pytest.mark.parametrize('trained', [0, 1, 1000, 10**10])
@pytest.mark.parametrize('hidden_size', [None, 1, 16, 100_000])
def test_sizes_fit_the_model_and_deepspeed(hidden_size: int | None, trained: int):
    values = model_values(hidden_size, trained)
    bucket = values['zero_optimization.reduce_bucket_size']
    assert 1 <= bucket <= max(1, trained)
    config, _ = resolve_auto({'zero_optimization': ZERO_3['zero_optimization']}, values)
    assert list(problems_of_keys(config)) == [] and list(leftover_autos(config)) == []
    if hidden_size is None:
        default = deepspeed.DeepSpeedConfig({'train_batch_size': 1}).zero_config.reduce_bucket_size
        assert bucket == max(1, min(trained, default))
        assert not set(SIZES[1:]) & set(config['zero_optimization'])


@pytest.mark.parametrize(
    ('name', 'arguments', 'expected'),
    [
        ('BertConfig', {'hidden_size': 36}, 36),
        ('MT5Config', {'d_model': 40}, 40),
        ('GPT2Config', {'n_embd': 24}, 24),
        ('BartConfig', {'d_model': 48}, 48),
        ('ResNetConfig', {'hidden_sizes': [8, 64, 32]}, 64),
        ('PretrainedConfig', {'text_config': SimpleNamespace(hidden_size=56)}, 56),
        ('PretrainedConfig', {'text_config': SimpleNamespace(hidden_sizes=[3, 2])}, 3),
    ],
)
def test_hidden_sizes_are_hugging_faces(name: str, arguments: dict, expected: int):
    model = SimpleNamespace(config=getattr(transformers, name)(**arguments))
    assert hidden_size_of(model) == hidden_size_of(SimpleNamespace(model=model)) == expected
    assert as_hugging_face_resolves(ZERO_3, model)['zero_optimization']['reduce_bucket_size'] == expected**2


def test_hidden_size_of_composers_wrapper():
    from composer.models import HuggingFaceModel

    config = transformers.BertConfig(
        hidden_size=12, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=10
    )
    assert hidden_size_of(HuggingFaceModel(transformers.BertForMaskedLM(config))) == 12


@pytest.mark.parametrize(
    'config',
    [
        {'hidden_size': 'auto'},
        {'hidden_size': True},
        {'hidden_size': 0, 'hidden_sizes': []},
        {'hidden_sizes': ['a']},
        {'d_model': None, 'text_config': {}},
        {},
    ],
)
def test_models_without_a_hidden_size(config: dict):
    assert hidden_size_of(SimpleNamespace(config=SimpleNamespace(**config))) is None
    assert hidden_size_of(SimpleNamespace(config=config)) is None
    assert hidden_size_of(SimpleNamespace()) is None


def test_a_whole_section():
    config = {'optimizer': 'auto', 'fp16': {'enabled': 'auto'}, 'scheduler': 'auto'}
    resolved, values = resolve_auto(config, {'optimizer': LEAVE_OUT, 'fp16': LEAVE_OUT, 'scheduler': {'type': 'x'}})
    assert resolved == {'fp16': {'enabled': 'auto'}, 'scheduler': {'type': 'x'}}
    assert values == {'optimizer': LEAVE_OUT, 'scheduler': {'type': 'x'}}


def test_nothing_is_shared_with_the_original():
    config = {'optimizer': {'params': {'betas': [0.9, 'auto']}}}
    known = {'a': [1]}
    resolved, values = resolve_auto({**config, 'a': 'auto'}, known)
    resolved['optimizer']['params']['betas'][0] = 0.5
    resolved['a'].append(2)
    assert config['optimizer']['params']['betas'] == [0.9, 'auto']
    assert known == values == {'a': [1]}


def test_the_marker_for_leaving_out():
    assert copy.deepcopy(LEAVE_OUT) is LEAVE_OUT and pickle.loads(pickle.dumps(LEAVE_OUT)) is LEAVE_OUT
    assert f'{LEAVE_OUT!r}' == 'left out'


def test_leftovers_at_any_depth():
    config = {
        'steps_per_print': 'auto',
        'zero_optimization': {'offload_param': {'buffer_size': 'auto'}, 'leaf_module': {'names': ['a', 'auto']}},
        'optimizer': {'params': {'betas': ['auto', 0.9], 'lr': 'automatic'}},
    }
    problems = list(leftover_autos(config))
    places = ['steps_per_print', 'zero_optimization.offload_param.buffer_size']
    places += ['zero_optimization.leaf_module.names[1]', 'optimizer.params.betas[0]']
    assert [problem.split("='auto'")[0] for problem in problems] == [f'ds_config.{place}' for place in places]
    assert all(path in problem for problem in problems for path in UNDERSTOOD)


def test_deepspeeds_own_auto_is_left_alone():
    config = {'zero_optimization': {'zenflow': {'select_strategy': 'auto', 'update_interval': 'auto'}}}
    assert list(leftover_autos(config)) == [] and list(problems_of_keys(config)) == []
    assert resolve_auto(config, TRAINER) == (config, {})


def test_what_is_understood_are_keys_of_deepspeed():
    sections = {path.rsplit('.', 1)[0] if path.endswith('.*') else path for path in UNDERSTOOD}
    assert sections <= valid_keys()
    assert {path for path in TRAINER if 'params' not in path} | set(model_values(1, 1)) <= set(UNDERSTOOD)


KEYS = st.sampled_from(['a', 'b', 'c'])
VALUES = st.sampled_from(['auto', 'automatic', 1, None, True]) | st.lists(st.sampled_from(['auto', 2]), max_size=2)
NESTED = st.dictionaries(KEYS, st.recursive(VALUES, lambda values: st.dictionaries(KEYS, values), max_leaves=6))
KNOWN = st.dictionaries(
    st.lists(KEYS, min_size=1, max_size=3).map('.'.join), st.sampled_from([7, False, 'fp16', LEAVE_OUT]), max_size=5
)


@settings(deadline=None)
@given(NESTED, KNOWN)
def test_any_config(config: dict, known: dict):
    before = copy.deepcopy(config)
    resolved, values = resolve_auto(config, known)
    assert config == before
    assert values.keys() <= known.keys()
    flat, flat_resolved = _flat(config), _flat(resolved)
    for path, value in flat.items():
        expected = known[path] if value == 'auto' and path in known else value
        if expected is LEAVE_OUT:
            assert path not in flat_resolved
        else:
            assert flat_resolved[path] == expected
        assert (path in values) == (value == 'auto' and path in known)
    emptied = {path for path, value in flat_resolved.items() if value == {}}
    assert flat_resolved.keys() - emptied <= flat.keys()
    assert len(list(leftover_autos(resolved))) == str(resolved).count("'auto'")


def _flat(config: dict, above: str = '') -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flat(value, f'{above}{key}.') if isinstance(value, dict) and value else {f'{above}{key}': value}
    return flat
