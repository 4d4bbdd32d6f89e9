"""Requests for a story, and the stories."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from . import plots, words
from .phrase import pick, say, upper_first


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about; ``told`` are the parts its request names."""

    hero: words.Name
    kind: str
    thing: str
    place: str
    pal: str
    pal_named: bool
    told: tuple[str, ...]


_TOLD = (
    (), ("hero",), ("hero",), ("hero", "thing"), ("hero", "thing"), ("hero", "thing"),
    ("hero", "pal"), ("hero", "place"), ("thing",), ("kind",), ("kind", "hero"),
    ("hero", "thing", "place"), ("hero", "pal", "thing"), ("kind", "thing"), ("kind", "pal"),
)
_HARD = (
    ("hero", "pal"), ("hero", "pal"), ("hero", "pal", "thing"), ("hero", "place"),
    ("hero", "thing", "place"), ("kind", "hero"), ("hero",),
)
_FINISH = (
    ("hero",), ("hero",), ("kind", "hero"), ("kind", "hero"), ("hero", "thing"), ("hero", "thing"),
    ("hero", "thing", "place"), ("hero", "place"), ("hero", "pal"), ("hero", "pal"), ("thing",),
    (), ("hero", "pal", "thing"), ("kind", "thing"),
)
TRAIN_ASKS = (
    "[Tell me|Write|Make up|Give me|Write me|Tell|Please tell me|Please write|Can you tell me|"
    "Could you write|I want|I would like|Can I have|Tell us|Let me hear] "
    "a [|short |little |nice |small |good |bedtime |happy |new ][story|story|story|"
    "tale]{about}[.|]",
    "[A |A short |A little |]story{about}[, please.|, please|.|]",
    "[I want to hear|I would love to hear|Do you know|Have you got|Please make up] a "
    "[|short |little |nice ]story{about}[.|?|]",
    "[Tell me another|Another|One more|Now tell me a] [story|short story]{about}[.|, please.|]",
    "[Please tell|Tell] [me |us |]something{about}[.|]",
)
HELD_ASKS = (
    "Please give us a nice tale{about}.",
    "Could you tell a good story{about}?",
    "I would like to hear a happy little story{about}, please.",
    "make up a new short story{about} for me",
    "Can you write a small tale{about}?",
)
_ABOUT = {
    (): "",
    ("hero",): " [about|about|of] [{H}|{H}|{H}|a {kind} named {H}|a {kind} called {H}]",
    ("hero", "thing"): " about [{H} and {a_t}|{H} and the {t}|{H} and {his} {t}|{H} who has {a_t}|"
    "a {kind} named {H} and {a_t}|{H} with {a_t}|{a_t} and {H}]",
    ("hero", "pal"): " about [{H} and {a_pal}|{H} and {pal}|{H} who meets {a_pal}]",
    ("hero", "place"): " about {H} [{at_p}|{at_p}|who goes to {p}]",
    ("thing",): " about [{a_t}|the {t}|a lost {t}]",
    ("kind",): " about [{a_kind}|a little {kind}|a brave {kind}]",
    ("kind", "hero"): " about {a_kind} [named|called|with the name] {H}",
    ("hero", "thing", "place"): " about {H} and {a_t} {at_p}",
    ("hero", "pal", "thing"): " about {H}, {a_pal} and {a_t}",
    ("kind", "thing"): " about {a_kind} and {a_t}",
    ("kind", "pal"): " about {a_kind} and {a_pal}",
}


def draw_cast(bank: words.Bank, told: tuple[str, ...] | None = None) -> Cast:
    """Choose hero, thing, place and friend; ``told`` says which of them the request names."""
    rng = bank.rng
    if told is None:
        if bank.finish:
            told = rng.choice(_FINISH)
        else:
            told = rng.choice(_HARD if bank.polish and rng.random() < 0.5 else _TOLD)
    hero, friend = bank.names(2)
    kind = "girl" if hero.girl else "boy"
    if "kind" in told or (not told and rng.random() < 0.2):
        kind = bank.animal() if told or not bank.late else rng.choice(words.ANIMALS)
    pal_named = rng.random() < 0.35
    if bank.late:
        hero = hero if "hero" in told else bank.name(0)
        friend = friend if "pal" in told else bank.name(0)
        while friend.text == hero.text:
            friend = bank.name(0)
        if kind in ("girl", "boy"):
            kind = "girl" if hero.girl else "boy"
    known = bank.late and "pal" not in told
    pal = friend.text if pal_named else rng.choice(words.ANIMALS) if known else bank.animal()
    while pal == kind:
        pal = bank.animal()
    # Only what the request names can be unknown: the rest is the model's own choice.
    thing = bank.thing(0.3) if "thing" in told else rng.choice(words.THINGS)
    place = rng.choice(words.PLACES) if "place" not in told else bank.place()
    return Cast(hero, kind, thing, place, pal, pal_named, told)


def _slots(cast: Cast) -> dict[str, str]:
    girl = cast.hero.girl
    named = cast.pal_named
    return {
        "H": cast.hero.text, "kind": cast.kind, "a_kind": words.article(cast.kind),
        "he": "she" if girl else "he", "He": "She" if girl else "He",
        "his": "her" if girl else "his", "His": "Her" if girl else "His",
        "him": "her" if girl else "him",
        "t": cast.thing, "a_t": words.article(cast.thing),
        "at_p": cast.place, "p": cast.place.split(" ", 1)[1],
        "pal": cast.pal if named else f"the {cast.pal}",
        "Pal": cast.pal if named else f"The {cast.pal}",
        "a_pal": cast.pal if named else words.article(cast.pal),
        "pal_call": cast.pal if named else f"little {cast.pal}",
        "pal_poss": f"{cast.pal}'s" if named else f"the {cast.pal}'s",
    }


def request(rng: random.Random, cast: Cast, held: bool = False) -> str:
    """A wording that asks for the story of this cast."""
    about = say(rng, _ABOUT[cast.told], **_slots(cast))
    text = pick(rng, HELD_ASKS if held else TRAIN_ASKS, about=about)
    return text if held or rng.random() > 0.25 else text[0].lower() + text[1:]


def request_beginning(rng: random.Random, cast: Cast) -> str:
    """A wording that asks for no more than the first sentences."""
    about = say(rng, _ABOUT[cast.told], **_slots(cast))
    asked = "[Start|Begin|Write the beginning of|Give me the start of] a story{about}[.|]"
    return say(rng, asked, about=about)


def begin(rng: random.Random, cast: Cast) -> str:
    """The first two sentences of a story about this cast."""
    slots = _slots(cast)
    lines = [pick(rng, plots.OPENINGS, **slots), say(rng, rng.choice(plots.PLOTS)[0], **slots)]
    return " ".join(upper_first(line) for line in lines)


def begin_fully(rng: random.Random, cast: Cast) -> str:
    """The first sentences, as far as he or she and what the request names have come up."""
    slots = _slots(cast)
    wanted = [r"\{(he|He|his|His|him)\}"]
    wanted += [r"\{(a_t|t)\}"] if "thing" in cast.told else []
    wanted += [r"\{(pal|Pal|a_pal)\}"] if "pal" in cast.told else []

    def needed(plot: tuple[str, ...]) -> int:
        return max(next(at for at, line in enumerate(plot) if re.search(one, line))
                   for one in wanted) + 1

    plot = min((rng.choice(plots.PLOTS) for _ in range(2)), key=needed)
    lines = [pick(rng, plots.OPENINGS, **slots)]
    lines += [say(rng, line, **slots) for line in plot[: needed(plot)]]
    return " ".join(upper_first(line) for line in lines)


def tell(rng: random.Random, cast: Cast) -> str:
    """A story of 60 to 150 words about this cast."""
    slots = _slots(cast)
    while True:
        lines = [pick(rng, plots.OPENINGS, **slots)]
        lines += [say(rng, line, **slots) for line in rng.choice(plots.PLOTS)]
        lines.append(pick(rng, plots.ENDINGS, **slots))
        text = " ".join(upper_first(line) for line in lines)
        if 64 <= len(text.split()) <= 146:
            return text
