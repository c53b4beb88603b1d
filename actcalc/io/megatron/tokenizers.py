"""Entries of the vocabulary that a tokenizer's type or name implies, where none is given."""

from __future__ import annotations

from typing import Any

from actcalc.errors import SpecError
from actcalc.io import hub_ids, presets
from actcalc.io.megatron.options import Options

_WORD_PIECES = {"BertWordPieceCase": 28996, "BertWordPieceLowerCase": 30522}
"""Entries of vocab.txt of bert-large-cased and bert-large-uncased (Devlin et al. 2018)."""

_TYPES = {
    "GPT2BPETokenizer": 50257,  # gpt2-vocab.json (Radford et al. 2019)
    "Llama2Tokenizer": 32000,  # tokenizer.model of Llama 2 (Touvron et al. 2023)
    "Llama3Tokenizer": 128256,  # Dubey et al. 2024, table 3
    "TikTokenizer": 131072,  # tiktoken_tokenizer.py DEFAULT_TIKTOKEN_MAX_VOCAB
}
"""Types that read one vocabulary whatever the file."""

_NAMED = ("tokenizer-model", "tokenizer-name-or-path", "hf-checkpoint", "tokenizer-hf-path")


def word_pieces(o: Options) -> bool:
    """Whether the tokenizer is BERT's."""
    return o.text("tokenizer-type") in _WORD_PIECES


def vocabulary(
    o: Options, default: str, warnings: list[str], needs: dict[str, SpecError]
) -> dict[str, Any]:
    """The vocabulary's size, as a field; nothing where a tokenizer is named that is not known.

    The WordPiece types read BERT's vocabulary files; the tokenizer adds [BOS], [EOS] and the
    extra ids (training/tokenizer/tokenizer.py _BertWordPieceTokenizer). Without a type BERT and
    T5 take the lower-case one (args_defaults of pretrain_bert.py and pretrain_t5.py).
    """
    if given := o.number("pad-vocab-size-to", 0) or o.number("vocab-size", 0):
        return {"vocab": given}
    kind = o.text("tokenizer-type") or default
    words = _WORD_PIECES.get(kind)
    if words is not None:
        vocab = words + 2 + o.number("vocab-extra-ids", 0)
        warnings.append(
            f"vocab-size is not given: {vocab} entries are taken, those of {kind} with BERT's own "
            f"file ({words}), [BOS], [EOS] and the extra ids."
        )
        return {"vocab": vocab}
    names = [name for key in _NAMED if (name := o.text(key))]
    for name in names:
        word = "/".join(name.rstrip("/").split("/")[-2:])
        preset = hub_ids.preset_of(word)[0] or _same_name(name)
        if preset:
            vocab = presets.load("models", preset).values["model"]["vocab"]
            warnings.append(f"vocab-size is not given: {vocab} entries are taken, {preset}'s.")
            return {"vocab": vocab}
    if kind in _TYPES:
        warnings.append(
            f"vocab-size is not given: {_TYPES[kind]} entries are taken, those of {kind}."
        )
        return {"vocab": _TYPES[kind]}
    if kind or names:
        what = " ".join(word for word in (kind, *names) if word)
        needs["model.vocab"] = SpecError(
            f"vocab-size is not given, and the vocabulary of {what} is not known here",
            "add vocab-size to the options, or --set vocab=32000",
        )
        return {}
    warnings.append(
        "vocab-size is not given: GPT-2's 50257 entries are taken (padded like Megatron does)."
    )
    return {"vocab": 50257}


def _same_name(path: str) -> str:
    """The preset that a folder is named like: ``/models/Qwen2.5-7B``."""
    word = path.rstrip("/").split("/")[-1].lower()
    return word if presets.exists("models", word) else ""
