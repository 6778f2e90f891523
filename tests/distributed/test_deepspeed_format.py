"""DeepSpeed's checkpoints are read as what was in the engine, and as DeepSpeed's own zero_to_fp32 reads them."""

from __future__ import annotations

import pathlib
import random
import shutil
from typing import Any

import pytest
import torch

from composer_ds.deepspeed_format import DeepSpeedSource, is_deepspeed_checkpoint
from composer_ds.errors import CheckpointError
from composer_ds.testing import RankPool
from tests.distributed import deepspeed_format_cases

FAST = [
    ('zero1', 'adamw'),
    ('zero1-bf16-fp32', 'adamw'),
    ('zero2-cpu', 'sgd'),
    ('zero2-bf16', 'adamw'),
    ('zero3-cut', 'adamw'),
    ('zero3-cut-bf16', 'sgd'),
]
SLOW = [
    (config, optimizer)
    for config in deepspeed_format_cases.CONFIGS
    for optimizer in ('adamw', 'sgd')
    if (config, optimizer) not in FAST and config not in ('zero2-fp16', 'zero2-round')
]


def read(source: DeepSpeedSource, name: str, state: str | None = None) -> torch.Tensor:
    """Read a tensor whole, and once more in runs of random lengths."""
    shape = source.tensors[name].shape
    whole = source.read(name, 0, shape.numel(), state)
    generator, runs, start = random.Random(name), [], 0
    while start < shape.numel():
        runs.append(source.read(name, start, min(generator.randint(1, 9), shape.numel() - start), state))
        start += runs[-1].numel()
    assert torch.equal(torch.cat(runs) if runs else whole, whole), name
    return whole.view(shape)


def assert_equal_to(source: DeepSpeedSource, found: dict[str, Any], bits_16: bool = False) -> None:
    """Compare everything with what was in the engine."""
    assert source.missing() == [] and source.damaged() == []
    assert set(source.tensors) == set(found['weights'])
    for name, expected in found['weights'].items():
        stored = source.tensors[name]
        assert stored.name == name and stored.shape == expected.shape and stored.dtype == expected.dtype, name
        assert torch.equal(read(source, name), expected), name
    for (name, key), expected in found['state'].items():
        assert torch.equal(read(source, name, key), expected), (name, key)
    keys = {(name, key) for name, stored in source.tensors.items() for key in stored.state}
    assert keys == set(found['state'])
    assert source.tied == found['tied']
    kinds = {name: stored.kind for name, stored in source.tensors.items()}
    assert kinds == found['kinds']
    for name, theirs in found.get('zero_to_fp32', {}).items():
        own: str = source.tied.get(name) or name
        assert torch.equal(read(source, own).float(), theirs.float()), name


def check(pool: Any, folder: pathlib.Path, config: str, optimizer: str) -> None:
    found = pool.run(deepspeed_format_cases.save, str(folder), config, optimizer)[0]
    source = DeepSpeedSource(folder)
    stage = int(config[4])
    assert source.facts['world size'] == pool.world_size and source.facts['ZeRO stage'] == stage
    assert source.facts['tag'] == 'global_step3' and source.facts['optimizer steps'] == 3
    assert source.facts['precision'] == ('bf16' if 'bf16' in config else 'fp16' if 'fp16' in config else 'fp32')
    if stage == 0:
        # With frozen parameters and groups, nothing says which state is of which parameter.
        assert source.state_absent_because is not None and 'by number' in source.state_absent_because
        found['kinds'] = {name: kind if kind == 'buffer' else 'unknown' for name, kind in found['kinds'].items()}
    assert_equal_to(source, found)
    if stage == 0:
        return
    trained = [name for name, kind in found['kinds'].items() if kind == 'trained']
    assert sorted(name for group in source.param_groups for name in group['params']) == sorted(trained)
    if config != 'zero1-elastic':  # which leaves the settings out
        assert ['scale'] in [group['params'] for group in source.param_groups if group['lr'] == 0.5]
        decay = {name: group['weight_decay'] for group in source.param_groups for name in group['params']}
        assert decay['first.weight'] == 0.1 and decay['first.bias'] == 0.0
    if optimizer == 'adamw':
        assert {source.scalar_state[name]['step'] for name in trained} == {3.0}
        assert len(found['state']) == 2 * len(trained)
    else:
        assert len(found['state']) == len(trained)
    # zero_to_fp32 leaves frozen parameters out on stage 1; of what it has, nothing is left out here.
    if 'zero_to_fp32' in found:
        assert ('fixed.weight' in found['zero_to_fp32']) == (stage > 1)


@pytest.mark.parametrize(('config', 'optimizer'), FAST)
def test_two_ranks(two_ranks, tmp_path, config, optimizer):
    check(two_ranks, tmp_path, config, optimizer)


@pytest.mark.parametrize(('config', 'optimizer'), [('zero1', 'sgd'), ('zero3-cut', 'adamw')])
def test_one_rank(one_rank, tmp_path, config, optimizer):
    check(one_rank, tmp_path, config, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(('config', 'optimizer'), SLOW)
def test_two_ranks_at_length(two_ranks, tmp_path, config, optimizer):
    check(two_ranks, tmp_path, config, optimizer)


@pytest.mark.slow
def test_parameters_in_turns(two_ranks, tmp_path):
    # DeepSpeed (0.19.8) lays the parameters out in turns, but stores where they would be otherwise, and its
    # safe_get_full_fp32_param reads them there. The optimizer's state must be that of the same training without.
    found = two_ranks.run(deepspeed_format_cases.save, str(tmp_path / 'turns'), 'zero2-round', 'adamw')[0]
    two_ranks.run(deepspeed_format_cases.save, str(tmp_path / 'plain'), 'zero2', 'adamw')
    source, plain = DeepSpeedSource(tmp_path / 'turns'), DeepSpeedSource(tmp_path / 'plain')
    for name, stored in plain.tensors.items():
        assert torch.equal(read(source, name), found['zero_to_fp32'][name]), name
        for key in (None, *stored.state):
            torch.testing.assert_close(read(source, name, key), read(plain, name, key), msg=f'{name} {key}')


@pytest.mark.slow
def test_fp16(two_ranks, tmp_path):
    if not two_ranks.run(deepspeed_format_cases.has_fp16)[0]:
        pytest.skip('this processor cannot train in fp16')
    check(two_ranks, tmp_path, 'zero2-fp16', 'adamw')


@pytest.mark.long
def test_four_ranks(four_ranks, tmp_path):
    for config in ('zero1', 'zero2-bf16', 'zero1-bf16-fp32', 'zero3-cut', 'zero3-cut-cpu-params'):
        check(four_ranks, tmp_path / config, config, 'adamw')


@pytest.mark.parametrize('config', ['zero0', 'zero0-bf16'])
def test_stage_0_with_all_parameters_in_one_group_has_its_optimizer_state(one_rank, tmp_path, config):
    found = one_rank.run(deepspeed_format_cases.save, str(tmp_path), config, 'adamw', True)[0]
    source = DeepSpeedSource(tmp_path)
    assert source.state_absent_because is None and len(found['state']) == 10
    assert {stored.dtype for stored in source.tensors.values()} == {torch.float32}
    assert_equal_to(source, found)
    assert [len(group['params']) for group in source.param_groups] == [5]


@pytest.mark.slow
def test_hugging_face(tmp_path):
    # Processes of their own: Accelerate sets variables and keeps a state in its classes.
    with RankPool(2, timeout_sec=100) as pool:
        for stage in (2, 3):
            found = pool.run(deepspeed_format_cases.save_by_trainer, str(tmp_path / str(stage)), stage)[0]
            source = DeepSpeedSource(tmp_path / str(stage) / 'checkpoint-3')
            assert source.facts['written by'] == 'Hugging Face Trainer' and source.facts['tag'] == 'global_step3'
            assert source.prefix == '' and 'model.first.weight' in source.tensors
            assert_equal_to(source, found)
        found = pool.run(deepspeed_format_cases.save_by_accelerate, str(tmp_path / 'state'))[0]
        source = DeepSpeedSource(tmp_path / 'state')
        assert source.facts['written by'] == 'Hugging Face Accelerate' and source.facts['tag'] == 'pytorch_model'
        assert_equal_to(source, found)


# Lightning, MMEngine and Composer 0.27 cannot be installed beside the current Composer: their folders are made from a
# raw engine, by the lines of their source that save.
def test_lightning(two_ranks, tmp_path):
    found = two_ranks.run(deepspeed_format_cases.save_as_lightning, str(tmp_path))[0]
    path = tmp_path / 'epoch=2.ckpt'
    for given in (path, path / 'checkpoint'):
        assert is_deepspeed_checkpoint(given)
        source = DeepSpeedSource(given)
        assert source.facts['written by'] == 'Lightning 2.0.9' and source.facts['epoch'] == 2
        assert source.prefix == '_forward_module.'
        assert set(source.tensors) == set(found['weights'])
        assert source.tied == {'head.weight': 'embedding.weight', 'twin.weight': 'fixed.weight'}
        for name, expected in found['weights'].items():
            assert torch.equal(read(source, name), expected), name
    assert '_forward_module.scale' in DeepSpeedSource(path, prefix='').tensors


def test_mmengine(two_ranks, tmp_path):
    found = two_ranks.run(deepspeed_format_cases.save_as_mmengine, str(tmp_path))[0]
    source = DeepSpeedSource(tmp_path / 'epoch_1.pth')
    assert source.facts['written by'] == 'MMEngine 0.10.7' and source.facts['epoch'] == 1
    assert_equal_to(source, found)
    with pytest.raises(CheckpointError, match=r"no file 'latest'.*It holds epoch_1.pth: name one"):
        DeepSpeedSource(tmp_path)


@pytest.mark.parametrize(('end', 'config'), [('.tar', 'zero2'), ('.tar.gz', 'zero3-cut')])
def test_composer_up_to_0_27(two_ranks, tmp_path, end, config):
    found = two_ranks.run(deepspeed_format_cases.save_as_composer, str(tmp_path), end, config)[0]
    for name in (f'ep1-ba5-rank0{end}', f'ep1-ba5-rank1{end}', f'ep1-ba5-rank{{rank}}{end}'):
        assert is_deepspeed_checkpoint(tmp_path / name)
        source = DeepSpeedSource(tmp_path / name)
        facts = {key: source.facts[key] for key in ('written by', 'run name', 'epoch', 'batch')}
        assert facts == {
            'written by': 'Composer, with a deepspeed_config', 'run name': 'a-run', 'epoch': 1, 'batch': 5
        }  # fmt: skip
        assert_equal_to(source, found)
    (tmp_path / f'ep1-ba5-rank1{end}').unlink()
    source = DeepSpeedSource(tmp_path / f'ep1-ba5-rank0{end}')
    assert 'zero_pp_rank_1_mp_rank_00_optim_states.pt is missing' in ''.join(source.missing())


@pytest.mark.slow
@pytest.mark.parametrize('config', ['zero2', 'zero3-cut'])
def test_universal(two_ranks, tmp_path, config):
    found = two_ranks.run(deepspeed_format_cases.save_universal, str(tmp_path), config)[0]
    source = DeepSpeedSource(tmp_path / 'a_universal')
    assert source.facts['converted by'] == 'ds_to_universal'
    assert_equal_to(source, found)
    decay = {name: group['weight_decay'] for group in source.param_groups for name in group['params']}
    assert decay['first.weight'] == 0.1 and decay['first.bias'] == 0.0
    assert {values['step'] for values in source.scalar_state.values()} == {3.0}


@pytest.fixture(scope='module')
def saved(two_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp('saved')
    for config in ('zero2', 'zero3-cut'):
        two_ranks.run(deepspeed_format_cases.save, str(folder / config), config, 'adamw')
    return folder


@pytest.mark.parametrize('config', ['zero2', 'zero3-cut'])
@pytest.mark.parametrize('rank', [0, 1])
def test_a_missing_shard(saved, tmp_path, config, rank):
    shutil.copytree(saved / config, tmp_path / 'c')
    name = f'zero_pp_rank_{rank}_mp_rank_00_optim_states.pt'
    (tmp_path / 'c/global_step3' / name).unlink()
    source, complete = DeepSpeedSource(tmp_path / 'c'), DeepSpeedSource(saved / config)
    assert source.missing() == [f'{name} is missing: one of 2 ranks has not written it.']
    assert source.tensors == complete.tensors
    # The largest tensor of a group that is laid over both ranks.
    with pytest.raises(CheckpointError, match=f'{name} is missing'):
        torch.cat(
            [source.read(one, 0, complete.tensors[one].shape.numel()) for one in ('embedding.weight', 'second.weight')]
        )


@pytest.mark.parametrize('config', ['zero2', 'zero3-cut'])
def test_without_any_partitions(saved, tmp_path, config):
    shutil.copytree(saved / config, tmp_path / 'c')
    for path in (tmp_path / 'c/global_step3').glob('*optim_states.pt'):
        path.unlink()
    if config == 'zero3-cut':
        with pytest.raises(CheckpointError, match='lacks every file with partitions'):
            DeepSpeedSource(tmp_path / 'c')
        return
    source, complete = DeepSpeedSource(tmp_path / 'c'), DeepSpeedSource(saved / config)
    assert len(source.missing()) == 2 and 'the weights are those of the module' in str(source.state_absent_because)
    for name, stored in source.tensors.items():
        assert torch.equal(read(source, name), read(complete, name)) and not stored.state


def test_damage(saved, tmp_path):
    shutil.copytree(saved / 'zero3-cut', tmp_path / 'c')
    name = 'zero_pp_rank_1_mp_rank_00_optim_states.pt'
    path = tmp_path / 'c/global_step3' / name
    source = DeepSpeedSource(tmp_path / 'c')
    good = path.read_bytes()
    place = good.index(source.read('first.weight', 18, 4).numpy().tobytes())
    path.write_bytes(good[:place] + bytes([good[place] ^ 8]) + good[place + 1 :])
    (found,) = DeepSpeedSource(tmp_path / 'c').damaged()
    assert found.startswith(f'{name} is damaged: the record')
    path.write_bytes(good[: len(good) // 2])
    source = DeepSpeedSource(tmp_path / 'c')
    assert f'{name} is truncated' in source.damaged()[0]
    with pytest.raises(CheckpointError, match=f'{name} is truncated'):
        source.read('first.weight', 0, 35)


def test_partitions_of_another_run(saved, tmp_path, one_rank):
    shutil.copytree(saved / 'zero2', tmp_path / 'c')
    one_rank.run(deepspeed_format_cases.save, str(tmp_path / 'other'), 'zero2', 'adamw')
    name = 'zero_pp_rank_1_mp_rank_00_optim_states.pt'
    shutil.copy(
        tmp_path / 'other/global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt', tmp_path / 'c/global_step3' / name
    )
    with pytest.raises(CheckpointError, match='of a run on 1 ranks, the others of one on 2'):
        read(DeepSpeedSource(tmp_path / 'c'), 'first.weight')


def test_an_unknown_layout_is_noticed(saved, tmp_path):
    # Of the rules by which a later version might lay out parameters, one: the first two in the other order.
    shutil.copytree(saved / 'zero2', tmp_path / 'c')
    path = tmp_path / 'c/global_step3/mp_rank_00_model_states.pt'
    content = torch.load(path, weights_only=False)
    shapes = content['param_shapes'][0]
    shapes.move_to_end('embedding.weight')
    torch.save(content, path)
    with pytest.raises(CheckpointError, match='in a way that is not known here'):
        DeepSpeedSource(tmp_path / 'c')
