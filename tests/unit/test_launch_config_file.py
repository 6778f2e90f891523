"""Reading the YAML: values, origins, and everything that can be wrong with a file or an override."""

from __future__ import annotations

import pytest
import yaml

from composer_ds.errors import ConfigError
from composer_ds.launch.config_file import read

TEXT = """\
# a comment
task: recipes.mt5
train:
  max_duration: 10ba
  eval_interval: ${train.max_duration}
optimizer:
  name: adamw
  lr: 3e-3
  betas:
    - 0.9
    - 0.99
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'run.yaml'
    path.write_text(TEXT)
    return str(path)


def problems_of(*arguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*arguments)
    return caught.value.problems


def test_a_file_alone_gives_what_yaml_gives(file):
    values = read(file).values
    expected = yaml.safe_load(TEXT)
    expected['train']['eval_interval'] = '10ba'
    expected['optimizer']['lr'] = 0.003  # PyYAML takes 3e-3, without a dot, for a string
    assert values == expected


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(file):
    values = read(file, ['optimizer.lr=1e-4', 'optimizer.betas=[0.5, 0.6]', 'seed=1', 'seed=2', 'new.key=null']).values
    assert values['optimizer'] == {'name': 'adamw', 'lr': 0.0001, 'betas': [0.5, 0.6]}
    assert values['seed'] == 2
    assert values['new'] == {'key': None}
    assert values['task'] == 'recipes.mt5'


def test_interpolations_see_the_overrides(file):
    assert read(file, ['train.max_duration=7ba']).values['train']['eval_interval'] == '7ba'


def test_an_override_may_hold_equals_signs(file):
    assert read(file, ['run_name=a=b']).values['run_name'] == 'a=b'


def test_origins_are_lines_of_the_file_or_the_command_line(file):
    source = read(file, ['optimizer.lr=1e-4', 'data.words=3'])
    line_of = {line.split(':')[0].strip(): number for number, line in enumerate(TEXT.splitlines(), start=1)}
    assert source.origin(('train', 'max_duration')) == f'in {file}, line {line_of["max_duration"]}'
    assert source.origin(('optimizer', 'betas', 1)) == f'in {file}, line {line_of["betas"] + 2}'
    assert source.origin(('optimizer', 'missing')) == f'in {file}, line {line_of["optimizer"]}'
    assert source.origin(('optimizer', 'lr')) == 'on the command line'
    assert source.origin(('data',)) == 'on the command line'
    assert source.origin(('checkpoint',)) == f'in {file}'


@pytest.mark.parametrize(
    'text', ['a: [1\nb: 2\n', 'a: 1\n\tb: 2\n', 'a:\n  b: 1\n c: 2\n', 'a: "open\n', 'a: 1\n---\nb: 2\n', 'a: *x\n']
)
def test_a_syntax_error_is_told_with_line_and_column(tmp_path, text):
    path = tmp_path / 'bad.yaml'
    path.write_text(text)
    with pytest.raises(yaml.MarkedYAMLError) as caught:
        yaml.safe_load(text)
    mark = caught.value.problem_mark
    assert mark is not None
    (problem,) = problems_of(str(path))
    assert problem.startswith(f'{path}, line {mark.line + 1}, column {mark.column + 1}: is not valid YAML: ')
    assert str(caught.value.problem) in problem


def test_a_syntax_error_worked_out_by_hand(tmp_path):
    path = tmp_path / 'bad.yaml'
    path.write_text('train:\n  max_duration: 1ba\n  eval_interval: 1ba: 2\n')
    (problem,) = problems_of(str(path))
    assert ', line 3, column 21: ' in problem


def test_a_key_given_twice_is_refused(tmp_path):
    path = tmp_path / 'twice.yaml'
    path.write_text('seed: 1\nseed: 2\n')
    (problem,) = problems_of(str(path))
    assert 'line 2' in problem and 'seed' in problem


def test_a_missing_file_is_answered_with_the_nearest_name(file, tmp_path):
    (problem,) = problems_of(str(tmp_path / 'rum.yaml'))
    assert problem == f"-f {tmp_path / 'rum.yaml'}: no such file; did you mean '{file}'?"


def test_a_missing_file_without_a_near_name_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of('nowhere/at/all.yaml')
    assert problem == f'-f nowhere/at/all.yaml: no such file (the working directory is {tmp_path})'


def test_a_folder_is_refused_with_what_is_in_it(file, tmp_path):
    (problem,) = problems_of(str(tmp_path))
    assert 'is a folder' in problem and problem.endswith('YAML files in it: run.yaml')


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'', 'is empty'),
        (b'# only a comment\n', 'is empty'),
        (b'- 1\n- 2\n', 'must be a mapping of sections (`train:` and so on), but is a sequence'),
        (b'just words\n', 'must be a mapping of sections (`train:` and so on), but is a scalar'),
        (b'\xff\xfe\x00', 'is not a text file in UTF-8'),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content, reason):
    path = tmp_path / 'run.yaml'
    path.write_bytes(content)
    (problem,) = problems_of(str(path))
    assert problem.startswith(f'-f {path}: {reason}')


@pytest.mark.parametrize('override', ['train.max_duration', '=1', ' =1', 'a=[1,', 'a={b: 1', 'a="open'])
def test_a_malformed_override_is_named(file, override):
    (problem,) = problems_of(file, [override])
    assert problem.startswith(f'override {override!r} on the command line: ')


def test_all_problems_of_file_and_overrides_come_at_once(tmp_path):
    problems = problems_of(str(tmp_path / 'nothing'), ['a', 'b=[', 'c=1'])
    assert [problem.split(':')[0] for problem in problems] == [
        f'-f {tmp_path / "nothing"}',
        "override 'a' on the command line",
        "override 'b=[' on the command line",
    ]


def test_what_cannot_be_resolved_is_left_out_and_explained(tmp_path):
    path = tmp_path / 'run.yaml'
    path.write_text('a: ???\nb: {c: "${nope}", d: 1}\ne: ["${a}"]\n')
    source = read(str(path))
    assert source.values == {'b': {'d': 1}, 'e': []}
    assert set(source.unresolved) == {('a',), ('b', 'c'), ('e', 0)}
    assert "'nope' not found" in source.unresolved[('b', 'c')]
