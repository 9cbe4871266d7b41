"""Tokenizers: loaded from a Hugging Face directory or a GGUF file, made of bytes, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from specbatch.errors import ModelError
from specbatch.models.checks import shown
from specbatch.models.formats.files import is_there
from specbatch.models.formats.gguf import GgufFile
from specbatch.models.formats.gguf_tokenizer import gguf_tokenizer

# Files that hold a whole tokenizer, with the module and the package that read them.
_OTHER_FORMATS = {
    "tokenizer.model": ("sentencepiece", "sentencepiece"),
    "tekken.json": ("mistral_common", "mistral-common"),
}
# Texts that are compared with SentencePiece. None begins with a space, which transformers joins to the first word.
_PROBES = ("The quick brown fox, 12345 times.", "Ça coûte 3 € – 日本語 😀", "def f(x):\n    return x")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *_OTHER_FORMATS)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("tekken.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json"),
)


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face directory (local files only) or of a `.gguf` file, chat template included.

    Raises ModelError where there is none, or where a GGUF's tokenizer is of a kind that cannot be rebuilt exactly.
    """
    if path.is_file():
        file = GgufFile(path)
        try:
            return gguf_tokenizer(file)
        except ModelError:
            raise
        except Exception as error:  # tokenizers has no class for its errors
            raise ModelError(
                f"{path}: the tokenizer's metadata is damaged: {_first_line(error)}", hint="download the file again"
            ) from error
        finally:
            file.close()
    has = {name: is_there(path / name) for name in _TOKENIZER_FILES}  # reading a pipe would block
    # tokenizer.json is read as it is. AutoTokenizer reads `tokenizer_class`, and transformers 5 rebuilds the pipeline
    # of that class: for SmolLM2 GPT2Tokenizer, which does not split digits, so that numbers become other tokens.
    loader = PreTrainedTokenizerFast if has["tokenizer.json"] else AutoTokenizer
    if path.is_dir() and not any(has[name] for name in _VOCABULARIES) and not any(path.glob("*.model")):
        raise ModelError(  # transformers would make one without a vocabulary
            f"{path} has no tokenizer: none of {', '.join(_VOCABULARIES)}",
            hint="put the tokenizer's files of the same model into the folder",
        )
    other = None if has["tokenizer.json"] or has["vocab.json"] else _other_format(path)
    try:
        tokenizer = loader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        tokenizer.encode("a")  # values of a wrong type are noticed only here
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ... by what is wrong
        raise ModelError(
            f"cannot load a tokenizer from {path}: {_first_line(error)}",
            hint="the directory needs tokenizer.json and tokenizer_config.json",
        ) from error
    if other == "tokenizer.model":
        _check_like_sentencepiece(tokenizer, path / other)
    if not isinstance(tokenizer.chat_template, str | dict | None):
        raise ModelError(f"{path}: the chat template must be a text, not {shown(tokenizer.chat_template)}")
    return tokenizer


def _other_format(path: Path) -> str | None:
    """Return the file of `_OTHER_FORMATS` that a folder has. It raises ModelError if the package that reads it is not
    installed."""
    for name, (module, package) in _OTHER_FORMATS.items():
        if is_there(path / name):
            if find_spec(module) is None:
                raise ModelError(
                    f"{path} has its tokenizer as {name}, and {package} is not installed",
                    hint=f"pip install {package}; or put the tokenizer.json of this model into the folder",
                )
            return name
    return None


def _check_like_sentencepiece(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Compare a tokenizer that transformers made of a SentencePiece model with the model itself. It raises ModelError
    if their tokens differ, as those of a class for another kind of model do."""
    from sentencepiece import SentencePieceProcessor

    own = SentencePieceProcessor(model_file=str(file))
    for text in _PROBES:
        if (found := tokenizer.encode(text, add_special_tokens=False)) != (expected := own.encode(text)):
            raise ModelError(
                f"{file}: {type(tokenizer).__name__} of transformers gives {text!r} the tokens {shown(found)}, and "
                f"SentencePiece gives {shown(expected)}",
                hint="tokenizer_class of tokenizer_config.json does not fit; or use the tokenizer.json of this model",
            )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def byte_tokenizer(vocab_size: int, eos_token_ids: Sequence[int] = ()) -> PreTrainedTokenizerBase:
    """A tokenizer for a model without files: every byte of UTF-8 is a token, nothing is merged.

    The bytes have the first 256 ids that end no text. Every other id has a text too, such as `<5321>`, so that what a
    random model writes can be shown; encoding gives none of these. The chat template writes `role: content` lines.
    Raises ModelError where the vocabulary has no room for the bytes.
    """
    special = {i: f"<|end-{i}|>" for i in eos_token_ids}
    if vocab_size < 256 + len(special):
        raise ModelError(f"a vocabulary of {vocab_size} tokens has no room for the 256 bytes")
    letters = iter(byte_letters())
    vocab = {special.get(i) or next(letters, f"<{i}>"): i for i in range(vocab_size)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=next(iter(special.values()), None),
        chat_template=_ROLE_LINES,
        clean_up_tokenization_spaces=False,
    )


_ROLE_LINES = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_letters() -> list[str]:
    """The visible letter that byte-level tokenizers write for each byte (GPT-2): itself where it is visible."""
    visible = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def describe_tokenizer_difference(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """None if every id that both tokenizers have means the same token; else the difference in one sentence.

    Only ids are compared, not merges: a draft model shares the target's token ids and never tokenizes text itself.
    """
    tokens_a, tokens_b = _tokens_by_id(a), _tokens_by_id(b)
    different = [i for i in sorted(tokens_a.keys() & tokens_b.keys()) if tokens_a[i] != tokens_b[i]]
    if not different:
        # A subset is compatible only if it is nearly all: tokenizers of two families may share a first few ids.
        smaller, larger = sorted((len(tokens_a), len(tokens_b)))
        return None if smaller >= 0.9 * larger else f"vocabulary sizes differ: {len(tokens_a)} and {len(tokens_b)}"
    parts = []
    if len(tokens_a) != len(tokens_b):
        parts.append(f"vocabulary sizes differ: {len(tokens_a)} and {len(tokens_b)}")
    first = different[0]
    parts.append(
        f"{len(different)} ids stand for different tokens: token {first} is {tokens_a[first]!r} in one, "
        f"{tokens_b[first]!r} in the other"
    )
    return "; ".join(parts)


def _tokens_by_id(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    return {i: text for text, i in tokenizer.get_vocab().items()}
