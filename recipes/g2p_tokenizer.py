"""The tokenizer of the grapheme-to-phoneme model that is trained from scratch: letters in, phonemes out."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import Regex, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

__all__ = ['GRAPHEMES', 'g2p_tokenizer', 'spell']

GRAPHEMES = "abcdefghijklmnopqrstuvwxyz'-."

# The identifiers of T5's own special tokens, so that the defaults of MT5Config hold.
_SPECIAL_TOKENS = ['<pad>', '</s>', '<unk>']


def g2p_tokenizer(phonemes: Sequence[str]) -> PreTrainedTokenizerFast:
    """Builds one tokenizer for both sides, in memory.

    Graphemes are lower-case and phonemes upper-case, so one vocabulary holds both without overlap. ``</s>`` ends both
    sides, as in T5. Decoding gives phonemes separated by one space.

    Args:
        phonemes (Sequence[str]): Upper-case phonemes, with or without stress digits.

    Returns:
        PreTrainedTokenizerFast: With ``<pad>`` 0, ``</s>`` 1, ``<unk>`` 2, then graphemes, then phonemes.
    """
    tokens = [*_SPECIAL_TOKENS, *GRAPHEMES, *phonemes]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token='<unk>'))
    # A token is a run of capitals with its stress digit, or any other single character; spaces separate and go.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r'[A-Z]+[0-2]?|\S'), behavior='removed', invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(single='$A </s>', special_tokens=[('</s>', 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token='<pad>',
        eos_token='</s>',
        unk_token='<unk>',
        model_input_names=['input_ids', 'attention_mask'],
    )


def spell(spelling: str) -> str:
    """Spells a word out, one space between its letters: the source text of the model.

    This tokenizer ignores the spaces. The sentencepiece tokenizer of a pretrained model would without them cut a word
    into pieces that hide its letters.

    Args:
        spelling (str): A word, such as ``cat``.

    Returns:
        str: Its letters, such as ``c a t``.
    """
    return ' '.join(spelling)
