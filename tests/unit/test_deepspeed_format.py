"""DeepSpeed's checkpoints that no CPU run writes, that want to do harm, or that are not where they should be.

The files are made here as DeepSpeed 0.19.8 lays them out; ``tests/distributed/test_deepspeed_format.py`` reads those
that DeepSpeed writes.
"""

from __future__ import annotations

import datetime
import enum
import os
import pathlib
import shutil
import sys
import tarfile
import types
from typing import Any

import pytest
import torch

from composer_ds.deepspeed_format import DeepSpeedSource, is_deepspeed_checkpoint
from composer_ds.deepspeed_format.prefixes import wrapper_prefix
from composer_ds.errors import CheckpointError

MODEL = 'mp_rank_00_model_states.pt'


def _module(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        'first.weight': torch.linspace(1, 2, 6, dtype=dtype).view(2, 3),
        'first.bias': torch.linspace(3, 4, 2, dtype=dtype),
        'first.count': torch.tensor(7),
        'second.weight': torch.linspace(5, 6, 4, dtype=dtype).view(2, 2),
    }


def _model_states(module: dict[str, torch.Tensor], **more: Any) -> dict[str, Any]:
    return {
        'module': module,
        'buffer_names': [name for name in module if name.endswith('first.count')],
        'optimizer': None,
        'param_shapes': None,
        'frozen_param_shapes': None,
        'shared_params': None,
        'frozen_param_fragments': None,
        'lr_scheduler': None,
        'skipped_steps': 0,
        'global_steps': 5,
        'dp_world_size': 1,
        'mp_world_size': 1,
        'ds_config': {'fp16': {'enabled': True}},
        'ds_version': '0.19.8',
        **more,
    }


def _write(folder: pathlib.Path, content: Any, name: str = MODEL) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / name)
    return folder


def _whole(source: DeepSpeedSource, name: str, state: str | None = None) -> torch.Tensor:
    shape = source.tensors[name].shape
    return source.read(name, 0, shape.numel(), state).view(shape)


def _fused_fp16(module: dict[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor]:
    """What DeepSpeed's FP16_Optimizer stores around FusedAdam, which needs a GPU: a vector for the parameter group."""
    weights = torch.cat([value.reshape(-1) for value in module.values() if value.is_floating_point()]).float()
    masters = weights + 1e-5 * weights  # less than fp16 can tell
    moments = torch.arange(masters.numel(), dtype=torch.float32)
    state = {0: {'step': 5, 'exp_avg': moments, 'exp_avg_sq': moments + 100}}
    optimizer = {
        'dynamic_loss_scale': True,
        'cur_scale': 65536.0,
        'optimizer_state_dict': {'state': state, 'param_groups': [{'lr': 0.1, 'params': [0]}]},
        'fp32_groups_flat': [masters],
        'clip_grad': 1.0,
    }
    return optimizer, masters


def test_stage_0_in_fp16(tmp_path):
    module = _module(torch.float16)
    optimizer, masters = _fused_fp16(module)
    assert not torch.equal(masters, masters.half().float())
    source = DeepSpeedSource(_write(tmp_path, _model_states(module, optimizer=optimizer)))
    assert source.state_absent_because is None and source.facts['precision'] == 'fp16'
    assert torch.equal(_whole(source, 'first.bias'), masters[6:8])
    assert torch.equal(_whole(source, 'second.weight', 'exp_avg_sq'), torch.arange(108.0, 112.0).view(2, 2))
    assert source.scalar_state['second.weight'] == {'step': 5}
    assert source.param_groups == [{'params': ['first.weight', 'first.bias', 'second.weight'], 'lr': 0.1}]
    assert source.tensors['first.count'].kind == 'buffer' and source.tensors['first.bias'].dtype == torch.float32


def test_stage_0_is_not_mapped_when_the_weights_disagree(tmp_path):
    # The two smaller parameters of the vector in the other order: same number of elements, other weights.
    module = _module(torch.float16)
    optimizer, _ = _fused_fp16(dict(reversed(module.items())))
    source = DeepSpeedSource(_write(tmp_path, _model_states(module, optimizer=optimizer)))
    assert 'by number' in str(source.state_absent_because) and source.param_groups == []
    assert source.tensors['first.bias'].dtype == torch.float16 and not source.tensors['first.bias'].state
    assert torch.equal(_whole(source, 'first.bias'), module['first.bias'])


def test_stage_0_with_named_parameters_is_mapped_by_name(tmp_path):
    module = _module()
    # Two groups, and the first weight frozen: only the names tell.
    groups = [
        {'lr': 0.1, 'params': [0], 'param_names': ['second.weight']},
        {'lr': 0.2, 'params': [1], 'param_names': ['first.bias']},
    ]
    state = {0: {'momentum_buffer': torch.full((2, 2), 8.0)}, 1: {'momentum_buffer': torch.full((2,), 9.0)}}
    source = DeepSpeedSource(
        _write(tmp_path, _model_states(module, optimizer={'state': state, 'param_groups': groups}))
    )
    assert source.state_absent_because is None
    assert _whole(source, 'second.weight', 'momentum_buffer').tolist() == [[8.0, 8.0], [8.0, 8.0]]
    assert _whole(source, 'first.bias', 'momentum_buffer').tolist() == [9.0, 9.0]
    assert not source.tensors['first.weight'].state
    assert source.param_groups == [{'params': ['second.weight'], 'lr': 0.1}, {'params': ['first.bias'], 'lr': 0.2}]


def test_runs_outside_of_a_tensor_are_refused(tmp_path):
    source = DeepSpeedSource(_write(tmp_path, _model_states(_module())))
    assert source.read('first.weight', 2, 0).shape == (0,)
    for start, numel in ((5, 2), (-1, 1), (0, -1)):
        with pytest.raises(ValueError, match='has 6 elements'):
            source.read('first.weight', start, numel)


def test_what_is_read_is_a_copy(tmp_path):
    source = DeepSpeedSource(_write(tmp_path, _model_states(_module())))
    source.read('first.weight', 0, 6).zero_()
    assert torch.equal(_whole(source, 'first.weight'), _module()['first.weight'])


class _Attack:
    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize('place', ['client state', 'module'])
@pytest.mark.parametrize(
    ('function', 'word'),
    [(os.system, 'posix.system'), (eval, 'eval'), (shutil.copyfile, 'shutil.copyfile'), (exec, 'exec')],
)
def test_no_code_of_a_file_runs(tmp_path, place, function, word):
    flag = tmp_path / 'flag'
    code = f'open({str(flag)!r}, "w").close()'
    if function is os.system:
        attack = _Attack(function, f'touch {flag}')
    elif function is shutil.copyfile:
        attack = _Attack(function, __file__, str(flag))
    else:
        attack = _Attack(function, code)
    module = {**_module(), **({'attack': attack} if place == 'module' else {})}
    folder = _write(tmp_path / 'global_step5', _model_states(module, **({'mine': attack} if place != 'module' else {})))
    with pytest.raises(CheckpointError, match='nothing of the file was loaded') as error:
        DeepSpeedSource(folder)
    assert word in str(error.value) and str(folder / MODEL) in str(error.value) and 'trusted=True' in str(error.value)
    assert is_deepspeed_checkpoint(folder)
    assert not flag.exists()
    # The test can fail: trusted, the code runs.
    DeepSpeedSource(folder, trusted=True)
    assert flag.exists()


def test_the_stand_in_of_getattr_is_no_getattr(tmp_path):
    # Python 3.11.0 to 3.11.3 stored members of an enum as getattr(ZeroStageEnum, 'weights').
    flag = tmp_path / 'flag'
    attack = _Attack(getattr, _Attack(eval, '1'), 'real')
    folder = _write(tmp_path / 'a', _model_states(_module(), mine=attack))
    with pytest.raises(CheckpointError, match='eval'):
        DeepSpeedSource(folder)
    folder = _write(tmp_path / 'b', _model_states(_module(), mine=[_Attack(getattr, 'text', 'upper')]))
    assert torch.equal(_whole(DeepSpeedSource(folder), 'first.bias'), _module()['first.bias'])
    assert not flag.exists()


@pytest.fixture
def deepspeeds_classes():
    """Classes of the names that DeepSpeed's have, so that files hold them without importing DeepSpeed."""
    made: dict[str, Any] = {}
    fragment = type('fragment_address', (), {'__module__': 'deepspeed.utils.tensor_fragment'})
    scaler = type('DynamicLossScaler', (), {'__module__': 'deepspeed.runtime.fp16.loss_scaler'})

    class ZeroStageEnum(int, enum.Enum):
        gradients = 2

    ZeroStageEnum.__module__ = 'deepspeed.runtime.zero.config'
    ZeroStageEnum.__qualname__ = 'ZeroStageEnum'
    kept = {}
    for one in (fragment, scaler, ZeroStageEnum):
        parts = one.__module__.split('.')
        for name in ('.'.join(parts[:end]) for end in range(1, len(parts) + 1)):
            if name == one.__module__ or name not in sys.modules:
                kept[name] = sys.modules.get(name)
                sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[one.__module__], one.__name__, one)
        made[one.__name__] = one
    yield made
    for name, module in kept.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


def test_stage_2_in_fp16(tmp_path, deepspeeds_classes):
    module = _module(torch.float16)
    order = ['first.weight', 'second.weight', 'first.bias']
    flat = torch.cat([module[name].reshape(-1).float() + 1e-5 for name in order])
    scaler = deepspeeds_classes['DynamicLossScaler']()
    vars(scaler).update(cur_scale=65536.0, dtype=torch.float16)
    # 12 elements on 2 ranks: 8 each, and the second rank's 4 of padding are not stored.
    starts = {'first.weight': [(0, 6)], 'second.weight': [(6, 2), (0, 2)], 'first.bias': [(2, 2)]}
    where = {0: {'first.weight': 0, 'second.weight': 0}, 1: {'second.weight': 1, 'first.bias': 0}}
    for rank in range(2):
        addresses = {}
        for name, index in where[rank].items():
            addresses[name] = deepspeeds_classes['fragment_address']()
            vars(addresses[name]).update(start=starts[name][index][0], numel=starts[name][index][1])
        moments = torch.arange(8.0) + 8 * rank
        stored = {
            'loss_scaler': scaler,
            'base_optimizer_state': {'state': {0: {'momentum_buffer': moments}}, 'param_groups': [{'params': [0]}]},
            'single_partition_of_fp32_groups': [flat[8 * rank :][:8]],
            'zero_stage': deepspeeds_classes['ZeroStageEnum'].gradients,
            'group_paddings': [4 * rank],
            'partition_count': [2],
            'param_slice_mappings': [addresses],
        }
        _write(tmp_path, {'optimizer_state_dict': stored}, f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt')
    shapes = [{name: module[name].shape for name in order}]
    _write(tmp_path, _model_states(module, param_shapes=shapes, shared_params={}, dp_world_size=2))
    source = DeepSpeedSource(tmp_path)
    assert source.missing() == [] and source.damaged() == []
    assert torch.equal(_whole(source, 'second.weight'), flat[6:10].view(2, 2))
    assert torch.equal(_whole(source, 'first.bias', 'momentum_buffer'), torch.tensor([10.0, 11.0]))
    assert source.tensors['first.count'].kind == 'buffer' and list(source.tensors) == list(module)


def test_names(tmp_path):
    assert wrapper_prefix(['module.a', 'module.b']) == 'module.'
    assert wrapper_prefix(['module.a', 'modules.b']) == ''
    assert wrapper_prefix(['_forward_module.module.a', '_forward_module.module.b']) == '_forward_module.module.'
    assert wrapper_prefix([]) == ''
    module = {f'module.{name}': value for name, value in _module().items()}
    _write(tmp_path, _model_states(module))
    source = DeepSpeedSource(tmp_path)
    assert source.prefix == 'module.' and source.facts['taken off the names'] == 'module.'
    assert list(source.tensors) == list(_module()) and source.tensors['first.count'].kind == 'buffer'
    assert torch.equal(_whole(source, 'first.weight'), _module()['first.weight'])
    source = DeepSpeedSource(tmp_path, prefix='')
    assert list(source.tensors) == list(module) and 'taken off the names' not in source.facts


def test_ties_of_stage_0_are_found(tmp_path):
    module = _module()
    module['head.weight'] = module['first.weight']
    module['copy.weight'] = module['first.weight'].clone()
    source = DeepSpeedSource(_write(tmp_path, _model_states(module)))
    assert source.tied == {'head.weight': 'first.weight'} and 'copy.weight' in source.tensors


def test_where_the_files_are(tmp_path):
    folder = _write(tmp_path / 'global_step5', _model_states(_module()))
    _write(tmp_path / 'global_step10', _model_states(_module()))
    assert is_deepspeed_checkpoint(folder) and is_deepspeed_checkpoint(tmp_path)
    assert not is_deepspeed_checkpoint(tmp_path / 'absent')
    with pytest.raises(CheckpointError, match=r"no file 'latest'.* It holds global_step5, global_step10: name one"):
        DeepSpeedSource(tmp_path)
    for tag in ('global_step7', '../global_step5', ''):
        (tmp_path / 'latest').write_text(tag)
        with pytest.raises(CheckpointError, match=r'there is no such folder beside it. It holds global_step5'):
            DeepSpeedSource(tmp_path)
    (tmp_path / 'global_step7').mkdir()
    (tmp_path / 'latest').write_text('global_step7\n')
    with pytest.raises(CheckpointError, match="holds none of DeepSpeed's files"):
        DeepSpeedSource(tmp_path)
    (tmp_path / 'latest').write_text('global_step5\n')
    assert DeepSpeedSource(tmp_path).facts['tag'] == 'global_step5'
    assert is_deepspeed_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match='holds no checkpoint of DeepSpeed'):
        DeepSpeedSource(_write(tmp_path / 'other', {}, 'weights.pt'))
    assert not is_deepspeed_checkpoint(tmp_path / 'other')
    with pytest.raises(CheckpointError, match='is not there'):
        DeepSpeedSource(tmp_path / 'absent')


def test_the_folder_of_a_run_of_hugging_face_is_pointed_further(tmp_path):
    for steps in (5, 10):
        _write(tmp_path / f'checkpoint-{steps}/global_step{steps}', _model_states(_module()))
        (tmp_path / f'checkpoint-{steps}/latest').write_text(f'global_step{steps}')
    with pytest.raises(CheckpointError, match=r'several checkpoints \(checkpoint-5, checkpoint-10\)'):
        DeepSpeedSource(tmp_path)


@pytest.mark.parametrize(
    ('name', 'word'),
    [
        ('layer_0_expert_1_mp_rank_00_model_states.pt', 'experts'),
        ('expp_rank_0_mp_rank_00_optim_states.pt', 'experts'),
        ('layer_03-model_states.pt', 'stages of a pipeline'),
        ('mp_rank_01_model_states.pt', 'tensor parallelism'),
        ('zero_pp_rank_0_mp_rank_01_optim_states.pt', 'tensor parallelism'),
    ],
)
def test_other_parallelism_is_refused(tmp_path, name, word):
    _write(tmp_path, _model_states(_module()))
    _write(tmp_path, {}, name)
    with pytest.raises(CheckpointError, match=word):
        DeepSpeedSource(tmp_path)


@pytest.mark.parametrize(
    ('content', 'word'),
    [
        ([1], 'holds list'),
        ({'module': None}, 'holds no state of a module'),
        (_model_states(_module(), optimizer={'state': {}}), 'is not laid out as'),
    ],
)
def test_files_of_another_content_are_refused(tmp_path, content, word):
    with pytest.raises(CheckpointError, match=word):
        DeepSpeedSource(_write(tmp_path, content))


def test_a_truncated_file_is_refused_by_name(tmp_path):
    _write(tmp_path, _model_states(_module()))
    path = tmp_path / MODEL
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=f'{MODEL} is truncated'):
        DeepSpeedSource(tmp_path)


def test_an_archive_cannot_write_elsewhere(tmp_path):
    folder = _write(tmp_path / 'files', _model_states(_module()))
    path = tmp_path / 'ep0-ba5-rank0.tar'
    evil = tmp_path / 'evil'
    evil.write_text('x')
    into = tmp_path / 'into'
    into.mkdir()
    with tarfile.open(path, 'w') as archive:
        archive.add(folder / MODEL, arcname=f'deepspeed/{MODEL}')
        archive.add(evil, arcname='../outside.pt')
        archive.add(evil, arcname='deepspeed/../../outside.pt')
        archive.add(evil, arcname='deepspeed/..')
    assert DeepSpeedSource(path, unpack_to=into).facts['written by'] == 'Composer, with a deepspeed_config'
    assert [entry.name for entry in into.iterdir()] == [MODEL]
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match='is damaged'):
        DeepSpeedSource(path)


def test_an_archive_of_plain_composer_is_not_one(tmp_path):
    states = _write(tmp_path / 'files', {'state': {'time': datetime.timedelta(1)}}, 'composer_states.pt')
    with tarfile.open(tmp_path / 'ep0-ba5-rank0.tar', 'w') as archive:
        archive.add(states, arcname='')
    assert not is_deepspeed_checkpoint(tmp_path / 'ep0-ba5-rank0.tar')
    assert not is_deepspeed_checkpoint(tmp_path / 'ep0-ba5-rank0.pt')
