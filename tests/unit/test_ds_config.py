"""Reading a ds_config; json, yaml and hjson, which DeepSpeed reads with, write and read the same files."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType

import hjson
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from composer_ds.ds_config import read_ds_config
from composer_ds.errors import ConfigError

CONFIG = {'gradient_clipping': 1.0, 'zero_optimization': {'stage': 2, 'reduce_bucket_size': 5e8}}

TEXTS = st.text(st.characters(codec='utf-8', exclude_categories=['Cs'])) | st.text('"\\/*#,{}[] \n')
CONFIGS = st.dictionaries(
    TEXTS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
        lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXTS, values, max_size=3),
        max_leaves=8,
    ),
    max_size=4,
)


def test_a_dict_is_copied():
    copy = read_ds_config(CONFIG)
    assert copy == CONFIG and copy is not CONFIG
    copy['zero_optimization']['stage'] = 3
    assert CONFIG['zero_optimization']['stage'] == 2
    assert read_ds_config(None) == {}
    given = {'optimizer': {'params': {'betas': [0.9, 0.95]}}}
    read_ds_config(given)['optimizer']['params']['betas'].clear()
    assert given == {'optimizer': {'params': {'betas': [0.9, 0.95]}}}


@pytest.mark.parametrize('wrapped', [OmegaConf.create(CONFIG), MappingProxyType({'a': MappingProxyType({'b': [1]})})])
def test_other_mappings_become_dicts(wrapped):
    config = read_ds_config(wrapped)
    assert config == wrapped
    assert all(type(value) is not type(wrapped) for value in (config, *config.values()))
    json.dumps(config)
    assert json.dumps(read_ds_config({'a': wrapped})) == json.dumps({'a': config})


def test_an_omegaconf_config_with_a_hole():
    with pytest.raises(ConfigError, match='stage'):
        read_ds_config(OmegaConf.create({'zero_optimization': {'stage': '???'}}))


@pytest.mark.parametrize('indent', [None, 4, '\t'])
def test_json(tmp_path, indent):
    (tmp_path / 'ds.json').write_text(json.dumps(CONFIG, indent=indent))
    assert read_ds_config(tmp_path / 'ds.json') == CONFIG
    assert read_ds_config(str(tmp_path / 'ds.json')) == CONFIG


@given(CONFIGS, st.sampled_from([None, 2]), st.booleans())
def test_any_json(tmp_path_factory, config: dict, indent: int | None, ascii_only: bool):
    path = tmp_path_factory.mktemp('json') / 'ds.json'
    path.write_text(json.dumps(config, indent=indent, ensure_ascii=ascii_only), encoding='utf-8')
    assert read_ds_config(path) == config


COMMENTED = """// a comment, with a "quote
{
    # another, with a }
    "a": 1, // { and "
    "b": {"url": "http://x/y#z", "c": [1, 2, /* , */ ], }, /* over
    two lines */ "d": "/* no comment */",
}
"""


@pytest.mark.parametrize('name', ['ds.json', 'ds', 'ds.txt'])
def test_comments_and_last_commas(tmp_path, name: str):
    (tmp_path / name).write_text('\ufeff' + COMMENTED, encoding='utf-8')
    config = {'a': 1, 'b': {'url': 'http://x/y#z', 'c': [1, 2]}, 'd': '/* no comment */'}
    assert read_ds_config(tmp_path / name) == config
    assert hjson.loads(COMMENTED) == config  # as DeepSpeed reads it


@pytest.mark.parametrize('text', ['{"a": tru\n}', "{'a': 1}", '{a: 1}', '{"a": 1\n "b": 2}', '{"a": cpu\n}', '"a": 1'])
def test_nothing_is_guessed(tmp_path, text: str):
    hjson.loads(text)  # DeepSpeed reads something
    (tmp_path / 'ds.json').write_text(text)
    with pytest.raises(ConfigError, match='does not parse as JSON'):
        read_ds_config(tmp_path / 'ds.json')


def test_an_error_names_the_line(tmp_path):
    (tmp_path / 'ds.json').write_text('/* two\nlines */ {\n"a": 1,\n "b": tru,\n}')
    with pytest.raises(ConfigError, match=r'line 4 column 7 .*"b": tru,'):
        read_ds_config(tmp_path / 'ds.json')
    (tmp_path / 'ds.yaml').write_text('a: 1\nb: [1\nc: 2\n')
    with pytest.raises(ConfigError, match='line 3'):
        read_ds_config(tmp_path / 'ds.yaml')


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('ds.json', '{"fp16": {}, "zero": {"stage": 2, "x": 1, "stage": 3}}'),
        ('ds.yaml', 'fp16: {}\nzero:\n  stage: 2\n  x: 1\n  stage: 3\n'),
    ],
)
def test_a_key_that_stands_twice(tmp_path, name: str, text: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match='stage'):
        read_ds_config(tmp_path / name)
    (tmp_path / name).write_text(text.replace('stage', 'other', 1))
    read_ds_config(tmp_path / name)


@pytest.mark.parametrize('name', ['ds.yaml', 'ds.yml', 'ds'])
def test_yaml(tmp_path, name: str):
    (tmp_path / name).write_text(yaml.safe_dump(CONFIG))
    assert read_ds_config(tmp_path / name) == CONFIG


@pytest.mark.parametrize('text', ['{"reduce_bucket_size": 5e8,\n\t"a": {}}', 'reduce_bucket_size: 5e8\na: {}'])
def test_numbers_are_numbers(tmp_path, text: str):
    (tmp_path / 'ds').write_text(text)
    assert read_ds_config(tmp_path / 'ds') == {'reduce_bucket_size': 500_000_000.0, 'a': {}}


@pytest.mark.parametrize(
    ('name', 'text', 'word'),
    [
        ('ds.json', '{"a": [1, }', 'does not parse'),
        ('ds.json', '[1, 2]', 'list'),
        ('ds.json', '', 'NoneType'),
        ('ds.yaml', '- 1\n- 2', 'list'),
        ('ds.yaml', '3', 'does not parse'),
        ('ds.yaml', '', 'NoneType'),
        ('ds.yaml', 'a: ???', 'does not parse'),
        ('ds.yaml', 'a: ${nowhere}', 'does not parse'),
    ],
)
def test_files_that_hold_no_settings(tmp_path, name: str, text: str, word: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_ds_config(tmp_path / name)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / 'ds.json').write_bytes(b'\xff\xfe\x00')
    with pytest.raises(ConfigError, match='does not parse'):
        read_ds_config(tmp_path / 'ds.json')


def test_other_sources():
    with pytest.raises(ConfigError, match='no such file'):
        read_ds_config('not/there.json')
    with pytest.raises(ConfigError, match='int'):
        read_ds_config(3)  # pyright: ignore[reportArgumentType]


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(ConfigError(['one', 'two'])))
    assert error.problems == ['one', 'two'] and '2 problems' in str(error)
