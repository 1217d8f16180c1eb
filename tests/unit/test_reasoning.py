"""Thinking against the clock: the thought's ids stay as they are, and the closing speaks the template's language."""

from __future__ import annotations

import copy

import pytest
import torch

from specdiff.decoder import SpeculativeDecoder
from specdiff.drafters.ngram import NgramDrafter
from specdiff.errors import ContextOverflowError, InputError
from specdiff.reasoning import Closing, close, closing_ids, reason
from specdiff.sampling import SamplingOptions
from specdiff.stopping import FinishReason
from specdiff.testing import TableTarget
from support.tokenizing import byte_level

TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
TOKENIZER = copy.deepcopy(byte_level())
TOKENIZER.chat_template = TEMPLATE
V = len(TOKENIZER)
EOS = TOKENIZER.eos_token_id
_LOGITS = torch.randn(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
_LAW = torch.softmax(_LOGITS, -1).expand(V, V, V)


class Spying(SpeculativeDecoder):
    """Keeps the prompts that it is given."""

    def generate(self, prompts, **options):  # type: ignore[override]
        self.seen = [*getattr(self, "seen", []), prompts]
        return super().generate(prompts, **options)


def decoder(*, eos: tuple[int, ...] = (), context: int | None = None, tokenizer=TOKENIZER) -> Spying:
    return Spying(TableTarget(_LAW, eos_ids=eos, context=context), NgramDrafter(vocab_size=V), tokenizer)


class Ticking:
    """Half a second at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def test_the_closing_is_the_templates_text_behind_the_thought():
    ids = closing_ids(decoder(), Closing(instruction="Stop. Answer.", opening="It is"), chat=True)
    assert TOKENIZER.decode(ids) == "<|end|>\n<|user|>user\nStop. Answer.<|end|>\n<|user|>assistant\nIt is"
    ids = closing_ids(decoder(), Closing(instruction="", opening="It is"), chat=True)
    assert TOKENIZER.decode(ids) == "<|end|>\n<|user|>assistant\nIt is"
    ids = closing_ids(decoder(), Closing(instruction="Stop.", opening="It is"), chat=False)
    assert TOKENIZER.decode(ids) == "\n\nStop.\nIt is"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_thought_is_the_first_part_of_the_unlimited_text_and_its_ids_are_kept(temperature):

    sampling, spy, told = SamplingOptions(temperature=temperature), decoder(), Closing(answer_tokens=5)
    result = reason(spy, "the fox", budget=6.0, closing=told, sampling=sampling, seed=3, clock=Ticking())
    whole = decoder().generate("the fox", chat=True, sampling=sampling, seed=3, max_new_tokens=2048)
    assert result.thought.finish is FinishReason.TIME
    assert 0 < len(result.thought.tokens) < len(whole.tokens)
    assert whole.tokens[: len(result.thought.tokens)] == result.thought.tokens
    prompt = spy.encode("the fox", chat=True).tolist()
    expected = [*prompt, *result.thought.tokens, *closing_ids(spy, told, chat=True)]
    assert spy.seen[-1].tolist() == expected
    assert len(result.answer.tokens) == 5
    assert result.thought_seconds >= 6.0
    assert result.answer_seconds > 0


def test_an_end_of_turn_is_not_said_twice():
    spy = decoder(eos=(EOS,))
    close(spy, torch.tensor([1, 2]), [5, 6, EOS], [EOS, 9], Closing(answer_tokens=2))
    assert spy.seen[-1].tolist() == [1, 2, 5, 6, EOS, 9]


def test_the_thought_leaves_room_for_the_answer():
    told = Closing(answer_tokens=4)
    tail = len(closing_ids(decoder(), told, chat=False))
    spy = decoder(context=3 + 7 + tail + 4)
    result = reason(spy, [1, 2, 3], budget=1e6, closing=told, chat=False)
    assert (len(result.thought.tokens), len(result.answer.tokens)) == (7, 4)
    with pytest.raises(ContextOverflowError, match="shorten"):
        reason(decoder(context=3 + tail + 4), [1, 2, 3], budget=1.0, closing=told, chat=False)


def test_what_cannot_be_closed_is_refused():
    with pytest.raises(InputError, match="instruction or an opening"):
        Closing(instruction=" ", opening="")
    with pytest.raises(InputError, match="answer_tokens"):
        Closing(answer_tokens=0)
    with pytest.raises(InputError, match="texts"):
        Closing(opening=None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokenizer"):
        reason(decoder(tokenizer=None), [1], budget=1.0)
    with pytest.raises(InputError, match="chat=False"):
        reason(decoder(tokenizer=byte_level()), [1], budget=1.0)
    forgetful = copy.deepcopy(TOKENIZER)
    forgetful.chat_template = "{{ messages[0].content }}"
    with pytest.raises(InputError, match="turns in order"):
        reason(decoder(tokenizer=forgetful), [1], budget=1.0)
    with pytest.raises(InputError, match="max_time"):
        reason(decoder(), "a", budget=0.0)
