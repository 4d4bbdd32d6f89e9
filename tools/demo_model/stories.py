"""Requests for a story, and the stories."""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass, replace

from . import plots, words
from .phrase import pick, say, upper_first


@dataclass(frozen=True)
class Cast:
    """Who and what a story is about; ``told`` are the parts its request names.

    The story says she or he of a hero whose ``kind`` is girl or boy, and the name of any other.
    """

    hero: words.Name
    kind: str
    thing: str
    place: str
    pal: str
    pal_named: bool
    told: tuple[str, ...]


_TOLD = (
    (), ("hero",), ("hero",), ("hero", "thing"), ("hero", "thing"), ("hero", "thing"),
    ("hero", "pal"), ("hero", "pal"), ("hero", "pal"), ("hero", "place"), ("hero", "place"),
    ("thing",), ("thing",), ("kind",), ("kind", "hero"), ("kind", "hero"), ("kind", "hero"),
    ("hero", "thing", "place"), ("hero", "thing", "place"), ("hero", "pal", "thing"),
    ("kind", "thing"), ("kind", "pal"),
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
    "[Tell|Write|Make up|tell|write|make up] a [|short |little |nice |new ][story|tale]{about} "
    "[for us|for my son|for the children|tonight|now|if you can|before I sleep][.|, please.|]",
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
    told = rng.choice(_TOLD) if told is None else told
    hero, friend = bank.names(2)
    kind = "girl" if hero.girl else "boy"
    if "kind" in told or (not told and rng.random() < 0.2):
        kind = bank.animal()
    pal_named = rng.random() < 0.35
    pal = friend.text if pal_named else bank.animal()
    while pal == kind:
        pal = bank.animal()
    thing = bank.thing(0.3) if "thing" in told else rng.choice(words.THINGS)
    place = rng.choice(words.PLACES) if "place" not in told else bank.place()
    cast = Cast(hero, kind, thing, place, pal, pal_named, told)
    return cast if bank.held else _familiar(bank, cast)


def _familiar(bank: words.Bank, cast: Cast) -> Cast:
    # Only what the request names can be unknown: the rest is the model's own choice, and it
    # chooses what it can spell.
    rng = bank.rng
    if "hero" not in cast.told or rng.random() < 0.3:
        hero = bank.common_name()
        person = "girl" if hero.girl else "boy"
        kind = person if cast.kind in ("girl", "boy") else cast.kind
        cast = replace(cast, hero=hero, kind=kind)
    if "kind" not in cast.told and cast.kind not in ("girl", "boy"):
        cast = replace(cast, kind=rng.choice(words.ANIMALS))
    if "pal" not in cast.told:
        cast = replace(cast, pal=bank.common_name().text if cast.pal_named else
                       rng.choice(words.ANIMALS))
    while cast.pal in (cast.kind, cast.hero.text):
        cast = replace(cast, pal=rng.choice(words.ANIMALS), pal_named=False)
    return cast


def _req_indices(cast: Cast) -> dict[str, str]:
    girl = cast.hero.girl
    named = cast.pal_named
    called = cast.kind not in ("girl", "boy")
    he = cast.hero.text if called else "she" if girl else "he"
    return {
        "H": cast.hero.text, "kind": cast.kind, "a_kind": words.article(cast.kind),
        "he": he, "He": upper_first(he), "his": "the" if called else "her" if girl else "his",
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
    about = say(rng, _ABOUT[cast.told], **_req_indices(cast))
    text = pick(rng, HELD_ASKS if held else TRAIN_ASKS, about=about)
    return text if held or rng.random() > 0.25 else text[0].lower() + text[1:]


def turn(rng: random.Random, cast: Cast, beginning: bool = False) -> tuple[str, str]:
    """A request and the story of this cast, or no more than its first sentences."""
    about = say(rng, _ABOUT[cast.told])
    if "hero" in cast.told and cast.kind in ("girl", "boy"):
        common = cast.hero.text in words.COMMON_GIRLS + words.COMMON_BOYS
        told = "{kind}" in about or "{his}" in about
        if rng.random() < 0.15 or not (common or told):
            cast = replace(cast, kind="child")
    about = about.format(**_req_indices(cast))
    if beginning:
        asked = "[Start|Begin|Write the beginning of|Give me the start of] a story{about}[.|]"
        return say(rng, asked, about=about), begin(rng, cast)
    asked = pick(rng, TRAIN_ASKS, about=about)
    return asked if rng.random() > 0.25 else asked[0].lower() + asked[1:], tell(rng, cast)


def _plot(rng: random.Random, cast: Cast) -> tuple[str, ...]:
    # Left to chance alone, the model would learn one plot for all names; so the name has a say in it.
    if rng.random() < 0.4:
        return rng.choice(plots.PLOTS)
    letter = string.ascii_lowercase.index(cast.hero.text[0].lower())
    return plots.PLOTS[letter % len(plots.PLOTS)]


def begin(rng: random.Random, cast: Cast) -> str:
    """The first sentences, as far as what the request names has come up."""
    slots = _req_indices(cast)
    wanted = [r"\{(a_t|t)\}"] if "thing" in cast.told else []
    wanted += [r"\{(pal|Pal|a_pal)\}"] if "pal" in cast.told else []
    wanted += [r"\{(at_p|p)\}"] if "place" in cast.told else []
    plot = _plot(rng, cast)
    needed = max((next(at for at, line in enumerate(plot) if re.search(one, line))
                  for one in wanted), default=1) + 1
    lines = [pick(rng, plots.OPENINGS, **slots)]
    lines += [say(rng, line, **slots) for line in plot[:needed]]
    return " ".join(upper_first(line) for line in lines)


def tell(rng: random.Random, cast: Cast) -> str:
    """A story of 60 to 150 words about this cast."""
    slots = _req_indices(cast)
    while True:
        lines = [pick(rng, plots.OPENINGS, **slots)]
        lines += [say(rng, line, **slots) for line in _plot(rng, cast)]
        lines.append(pick(rng, plots.ENDINGS, **slots))
        text = " ".join(upper_first(line) for line in lines)
        if 64 <= len(text.split()) <= 146:
            return text
