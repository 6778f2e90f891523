"""Who owns which setting. The expected values are worked out by hand from DESIGN's table of owners."""

from __future__ import annotations

import dataclasses

import pytest

from composer_ds.errors import ConfigError
from composer_ds.facts import Settings, TrainerFacts
from composer_ds.ownership import check_settings, make_plan

FACTS = TrainerFacts(
    precision='fp32',
    on_cpu=False,
    device_train_microbatch_size=4,
    number_of_deepspeed_algorithms=1,
    algorithms_and_callbacks=('LRMonitor', 'LabelSmoothing'),
    parallelism=(),
    optimizer_class='AdamW',
    trained_elements=1000,
    trained_without_optimizer=(),
    scalar_parameters=(),
    deepspeed_version='0.19.8',
)


def settings(zero_stage=2, offload_optimizer=None, offload_param=None, **ds_config) -> Settings:
    return Settings(zero_stage, offload_optimizer, offload_param, ds_config)


def problems(given: Settings, **facts) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(given, dataclasses.replace(FACTS, **facts))
    return caught.value.problems


def test_a_plain_plan():
    plan = make_plan(settings(), FACTS)
    assert plan.ds_config == {
        'zero_optimization': {'stage': 2, 'reduce_bucket_size': 1000},
        'managed_gradient_accumulation': False,
        'gradient_accumulation_steps': 1,
        'train_micro_batch_size_per_gpu': 4,
        'gradient_clipping': 0.0,  # nobody asked, and DeepSpeed's own default is 1.0
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    assert (plan.zero_stage, plan.offload_optimizer, plan.offload_param, plan.notes) == (2, False, False, ())


def test_stage_0_runs_as_stage_1_and_says_so():
    plan = make_plan(settings(0), FACTS)
    assert plan.zero_stage == plan.ds_config['zero_optimization']['stage'] == 1
    assert 'zero_stage=0' in plan.notes[0] and 'zero_stage=1' in plan.notes[0]


def test_bf16_has_fp32_masters_and_fp32_accumulation():
    plan = make_plan(settings(), dataclasses.replace(FACTS, precision='amp_bf16'))
    assert plan.ds_config['bf16'] == {'enabled': True}
    assert plan.ds_config['data_types'] == {'grad_accum_dtype': 'fp32'}
    assert 'communication_data_type' not in plan.ds_config
    stage_1 = make_plan(settings(1), dataclasses.replace(FACTS, precision='amp_bf16'))
    assert stage_1.ds_config['communication_data_type'] == 'fp32'


@pytest.mark.parametrize(
    ('given', 'refused'),
    [
        (settings(1), False),
        (settings(1, 'cpu'), True),
        (settings(0, 'cpu'), True),
        (settings(2), True),
        (settings(2, 'cpu'), True),
        (settings(3, 'cpu'), False),
        (settings(1, zero_optimization={'offload_optimizer': {'device': 'cpu'}}), True),
    ],
)
def test_bf16_with_versions_of_deepspeed_that_lose_gradients(given: Settings, refused: bool):
    old = dataclasses.replace(FACTS, precision='amp_bf16', deepspeed_version='0.19.7')
    make_plan(given, dataclasses.replace(old, precision='fp32'))
    make_plan(given, dataclasses.replace(old, deepspeed_version='0.19.10'))
    if refused:
        with pytest.raises(ConfigError, match=r'deepspeed>=0\.19\.8'):
            make_plan(given, old)
    else:
        make_plan(given, old)


def test_on_cpu_the_ds_config_may_ask_for_bf16():
    plan = make_plan(settings(bf16={'enabled': True}), dataclasses.replace(FACTS, on_cpu=True))
    assert plan.precision == 'amp_bf16' and plan.ds_config['bf16']['enabled'] is True and len(plan.notes) == 1
    assert 'disagree' in problems(settings(bf16={'enabled': True}))[0]  # on a GPU the Trainer's precision decides


@pytest.mark.parametrize('spelling', [settings(3, 'cpu', 'cpu'), settings(3, zero_optimization={
    'stage': 3, 'offload_optimizer': {'device': 'cpu'}, 'offload_param': {'device': 'cpu'}})])  # fmt: skip
def test_offload_in_either_place(spelling):
    plan = make_plan(spelling, FACTS)
    assert plan.offload_optimizer and plan.offload_param
    assert plan.ds_config['zero_optimization']['offload_param'] == {'device': 'cpu'}


def test_what_the_user_gave_is_kept_and_not_changed():
    zero = {'reduce_bucket_size': 77, 'offload_optimizer': {'pin_memory': True}}
    given = settings(2, 'cpu', zero_optimization=zero, gradient_clipping=0.5, steps_per_print=9)
    plan = make_plan(given, FACTS)
    assert plan.ds_config['gradient_clipping'] == 0.5 and plan.ds_config['steps_per_print'] == 9
    assert plan.ds_config['zero_optimization']['reduce_bucket_size'] == 77
    assert plan.ds_config['zero_optimization']['offload_optimizer'] == {'pin_memory': True, 'device': 'cpu'}
    assert zero == {'reduce_bucket_size': 77, 'offload_optimizer': {'pin_memory': True}}


def test_auto_and_agreeing_values_pass():
    given = settings(
        train_batch_size='auto', gradient_accumulation_steps='auto', train_micro_batch_size_per_gpu=4,
        gradient_clipping='auto', bf16={'enabled': 'auto'}, fp16={'enabled': False}, zero_optimization={'stage': 2},
    )  # fmt: skip
    assert make_plan(given, FACTS) == make_plan(settings(), FACTS)


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        (settings(4), ['zero_stage=4', '1, 2 and 3']),
        (settings(True), ['zero_stage=True']),
        (settings(2, 'gpu'), ["offload_optimizer='gpu'", "'cpu' and None"]),
        (settings(3, 'nvme'), ["'nvme'", 'NVMe']),
        (settings(2, None, 'cpu'), ["offload_param='cpu'", 'zero_stage=2', 'zero_stage=3']),
        (settings(gradient_cliping=1.0), ['gradient_cliping', "'gradient_clipping'"]),
        (settings(optimizer={'type': 'Adam'}), ['ds_config.optimizer', 'Trainer(optimizers=']),
        (settings(scheduler={'type': 'WarmupLR'}), ['ds_config.scheduler', 'Trainer(schedulers=']),
        (settings(zero_optimization={'stage': 3}), ['zero_stage=2', 'stage=3', 'disagree']),
        (settings(2, 'cpu', zero_optimization={'offload_optimizer': {'device': 'none'}}), ["'cpu'", "'none'"]),
        (settings(zero_optimization={'offload_optimizer': {'device': 'nvme'}}), ["device='nvme'"]),
        (settings(1, zero_optimization={'overlap_comm': True}), ['overlap_comm']),
        (settings(gradient_clipping=-1), ['gradient_clipping=-1']),
        (settings(zero_optimization=[]), ['zero_optimization=[]']),
    ],
)
def test_wrong_settings_are_refused_at_construction(given: Settings, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        check_settings(given)
    (problem,) = caught.value.problems
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ('given', 'facts', 'words'),
    [
        (settings(), {'number_of_deepspeed_algorithms': 2}, ['2 DeepSpeed instances']),
        (settings(), {'algorithms_and_callbacks': ('GradientClipping',)}, ['GradientClipping', 'gradient_clipping']),
        (settings(), {'algorithms_and_callbacks': ('EMA', 'LRMonitor')}, ['EMA']),
        (settings(), {'parallelism': ('fsdp',)}, ['parallelism_config', "'fsdp'"]),
        (settings(), {'precision': 'amp_fp16'}, ["'amp_fp16'", 'default on a GPU', "'amp_bf16'"]),
        (settings(), {'device_train_microbatch_size': 'auto'}, ["device_train_microbatch_size='auto'"]),
        (settings(), {'optimizer_class': None}, ['no optimizer']),
        (settings(), {'optimizer_class': 'LAMB'}, ['LAMB', 'zero_allow_untested_optimizer']),
        (settings(), {'trained_without_optimizer': ('a.weight',)}, ['a.weight', 'requires_grad=False']),
        (settings(), {'scalar_parameters': ('scale',)}, ['scale', '(1,)']),
        (settings(bf16={'enabled': True}), {}, ["precision='fp32'", 'bf16.enabled=True']),
        (settings(bf16={'enabled': False}), {'precision': 'amp_bf16'}, ["precision='amp_bf16'", 'bf16.enabled=False']),
        (settings(train_micro_batch_size_per_gpu=8), {}, ['device_train_microbatch_size=4', '=8']),
        (settings(train_batch_size=64), {}, ['train_batch_size=64', "'auto'"]),
        (settings(gradient_accumulation_steps=8), {}, ['gradient_accumulation_steps=8']),
    ],
)
def test_conflicts_with_the_trainer(given: Settings, facts: dict, words: list[str]):
    (problem,) = problems(given, **facts)
    assert all(word in problem for word in words), problem


def test_all_conflicts_at_once():
    given = settings(2, None, 'cpu', train_batch_size=64, optimizer={'type': 'Adam'}, misspelt=1)
    found = problems(given, precision='amp_fp8', optimizer_class='LARS', parallelism=('tp',))
    assert len(found) == 7
    with pytest.raises(ConfigError, match='7 problems'):
        make_plan(given, dataclasses.replace(FACTS, precision='amp_fp8', optimizer_class='LARS', parallelism=('tp',)))


def test_an_element_wise_optimizer_of_the_users_own():
    given = settings(zero_allow_untested_optimizer=True)
    assert make_plan(given, dataclasses.replace(FACTS, optimizer_class='Mine')).zero_stage == 2
