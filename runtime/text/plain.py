"""Texts of messages read as text only: nothing that they say becomes a special token.

Where the texts bring no special token, the ids are the usual ones. Else the prompt is encoded by a tokenizer that knows no
special token, but a stand-in for each, of the same flags. Stand-ins are put where the layout (a chat template) itself
writes special tokens, so that the library cuts and normalises the text there as it always does.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Iterable

import numpy as np
import tokenizers

from ..common.errors import BundleError, PromptError
from .marked import LaidOut, Marked
from .tokenizer import Tokenizer

_REMEDY = "leave it out, or give the request without plain_text"
_NOBODYS = "\U0010ffff"
"""A character of no vocabulary."""


class PlainTokenizer(Tokenizer):
    """Finds special tokens in what a layout writes, and none in texts of the caller's.

    `named` are ids that count as special, too, where they are added tokens (the model's end, its mark of a picture).
    """

    def __init__(self, usual: Tokenizer, named: Iterable[int | None] = ()):
        self.__dict__.update(usual.__dict__)  # not `super()`: it has been checked
        special_ids = usual.special_ids.union(i for i in named if i is not None)
        added = self.backend.get_added_tokens_decoder()
        self._special = {i: token for i, token in added.items() if i in special_ids and token.content}

    def encode(self, text: str, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids, int64 [n], of a text that is all the caller's. Raises as `encode_laid_out`."""
        return self.encode_laid_out(LaidOut(text, lambda: Marked.of_text(text), lambda _: add_special_tokens))

    def encode_laid_out(self, prompt: LaidOut) -> np.ndarray:
        """See `Tokenizer.encode_laid_out`. Raises `PromptError` for a special token that cannot be read as text."""
        text, laid = prompt.text, prompt.marked()
        for token in self._special.values():
            if any(token.content in field for field in laid.fields):
                raise PromptError(
                    f"plain_text: a role or a field of a message contains {token.content!r:.80}, a special token; {_REMEDY}"
                )
        adds = prompt.add_special_tokens(laid.prompt)
        usual = super().encode(text, adds)
        brought = self._brought(text, usual, laid, super().encode(laid.prompt, adds))
        return usual if brought is None else self._read_as_text(text, laid, adds, brought)

    def layout_of(self, prompt: LaidOut) -> Marked:
        """What of a prompt is read as its layout: all but the caller's texts."""
        return prompt.marked()

    def _brought(self, text: str, ids: np.ndarray, laid: Marked, marked_ids: np.ndarray) -> str | None:
        """A special token that texts bring into a prompt or take from it, as it is written; None for none."""
        for token in self._special.values():
            if text.count(token.content) != laid.prompt.count(token.content):
                return token.content
        # A token that is to stand as a word of its own is found beside a text or not, as that ends; no text says it.
        beside = {i for i, token in self._special.items() if token.single_word and not token.normalized}
        here, there = (
            [i for i in each.tolist() if self._is_special(i) and i not in beside]
            for each in (ids, marked_ids)
        )
        for one, other in itertools.zip_longest(here, there):
            if one != other:
                return self._special[other if one is None else one].content
        return None

    def _is_special(self, token_id: int) -> bool:
        return token_id in self._special and token_id not in self._unknown

    def _read_as_text(self, text: str, laid: Marked, adds: bool, brought: str) -> np.ndarray:
        """Token ids of a prompt whose texts hold a special token, `brought`."""
        plain, stand_ins, meant = self._plain
        refused = f"plain_text: the prompt contains {brought!r:.80}, a special token, which"
        own, marked = self._stood_in(laid.prompt, stand_ins)
        passages, literals = laid.written(text), laid.cut(marked)[0]
        if passages is None or len(literals) != len(passages) + 1:
            raise PromptError(f"{refused} the chat template does not write as text; {_REMEDY}")
        pieces = itertools.chain.from_iterable(itertools.zip_longest(literals, passages, fillvalue=""))
        encoding = self._encoding("".join(pieces), adds, plain)
        ids, specials = [], []
        for token_id, around in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            stood = None if around else meant.get(token_id)
            ids.append(token_id if stood is None else stood)
            if not around and (stood in stand_ins or self._is_special(ids[-1])):
                specials.append((ids[-1], stood in stand_ins))
        if specials != [(token_id, True) for token_id in own]:
            raise PromptError(f"{refused} this tokenizer cannot read as text; {_REMEDY}")
        return np.asarray(ids, np.int64)

    def _stood_in(self, marked: str, stand_ins: dict[int, str]) -> tuple[list[int], str]:
        """(the special tokens of a marked prompt, the prompt with their stand-ins)."""
        encoding = self._encoding(marked, False)
        own, pieces, behind = [], [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id not in stand_ins:
                continue
            content = self._special[token_id].content
            at = marked.find(content, start, stop)  # the token may take white space beside it
            if at >= 0:
                start, stop = at, at + len(content)
            elif token_id in self._unknown:
                continue
            own.append(token_id)
            pieces += [marked[behind:start], stand_ins[token_id]]
            behind = stop
        return own, "".join([*pieces, marked[behind:]])

    @functools.cached_property
    def _unknown(self) -> frozenset[int]:
        """Special tokens that the model gives for what it does not know."""
        try:
            ids = self._encoding(_NOBODYS, False).ids
        except BundleError:  # it knows no such token
            return frozenset()
        return frozenset(ids)

    @functools.cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, str], dict[int, int]]:
        """(the tokenizer without special tokens, the stand-in of each by its id, what the ids of added tokens mean)."""
        # The parts are shared: a copy by `to_str` takes memory for every gap between ids.
        plain = tokenizers.Tokenizer(self.backend.model)
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(self.backend, part) is not None:
                setattr(plain, part, getattr(self.backend, part))
        nonce = secrets.token_hex(8)  # nobody can type it
        stand_ins: dict[int, str] = {}
        contents: dict[str, int] = {}
        tokens = []
        for token_id, token in sorted(self.backend.get_added_tokens_decoder().items()):
            content = token.content
            if token_id in self._special:
                content = stand_ins[token_id] = f"Q{nonce}n{token_id}Q"
            contents[content] = token_id
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens.append(tokenizers.AddedToken(content, special=False, **flags))
        plain.add_tokens(tokens)
        meant: dict[int, int] = {}
        for content, token_id in contents.items():
            new = plain.token_to_id(content)
            if new is None or self.backend.model.id_to_token(new) not in (None, content):
                raise PromptError(
                    "plain_text: this bundle's tokenizer has gaps between its ids; give the request without plain_text"
                )
            meant[new] = token_id
        return plain, stand_ins, meant
