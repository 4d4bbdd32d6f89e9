"""The kinds of facts that questions are asked about: wordings, questions, answers."""

from __future__ import annotations

from dataclasses import dataclass

from . import words


@dataclass(frozen=True)
class Ask:
    """One question: its training wordings, its examination wordings and its answer."""

    train: tuple[str, ...]
    held: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Kind:
    """One kind of fact: how it is told and what can be asked about it."""

    tells: tuple[str, ...]
    asks: tuple[Ask, ...]


KINDS = {
    "has": Kind(
        ("{n} has {a_ct}.", "{n} [owns|carries|holds|bought|found|got|has got] {a_ct}.",
         "There is {a_ct} that belongs to {n}."),
        (
            Ask(("[Who|who] [has|owns|has got] the {t}?", "[Whose is the {t}?|Whose {t} is it?]",
                 "[Tell me who|Can you tell me who|Say who|Do you know who] has the {t}.",
                 "[Who is the owner of|Who is it that has|Who does have|Who has] the {c} {t}?",
                 "The {t} belongs to whom?", "To whom does the {t} belong?"),
                ("Do you know who owns the {t}?", "Say who has got the {c} {t}.",
                 "Who is it that owns the {t}?"), "{n}."),
            Ask(("[What|what] does {n} have?", "What [thing |]does {n} own?",
                 "What has {n} got?", "[Tell me what|Can you tell me what|Say what] {n} has.",
                 "Which thing does {n} have?", "What belongs to {n}?"),
                ("Which thing belongs to {n}?", "Can you tell me what {n} owns?"), "{A_ct}."),
            Ask(("[What|what] [colour|color] is the {t}?", "[What|Which] [colour|color] is {n}'s "
                 "{t}?", "[What|Which] [colour|color] does the {t} have?",
                 "[Tell me|Say|Name] the [colour|color] of the {t}.",
                 "What is the [colour|color] of [the {t}|{n}'s {t}]?",
                 "How is the {t} coloured?", "Is the {t} red or what colour is it?"),
                ("Name the colour of {n}'s {t}.", "Which colour has the {t} got?",
                 "What colour is the {t} of {n}?"), "It is {c}."),
        )),
    "lives": Kind(
        ("{n} lives in {y}.", "{n} [is from|comes from|has a house in|moved to] {y}.",
         "The home of {n} is in {y}."),
        (
            Ask(("[Where|where] does {n} live?",
                 "[In which|In what|Which] city does {n} live[ in|]?",
                 "[Tell me where|Can you tell me where|Say where] {n} lives.",
                 "Where is {n} from?", "Where is the home of {n}?", "What city is {n} from?"),
                ("Say in which city {n} lives.", "Which city is the home of {n}?"), "In {y}."),
            Ask(("[Who|who] lives in {y}?", "Who is from {y}?",
                 "[Tell me who|Can you tell me who|Say who|Do you know who] lives in {y}.",
                 "Which person lives in {y}?", "Who has a home in {y}?",
                 "Do you know who has a home in {y}?", "Who is the one that comes from {y}?"),
                ("Do you know who is from {y}?", "Who is the one that lives in {y}?"), "{n}."),
        )),
    "put": Kind(
        ("{n} [put|left|hid|placed] the {t} {s}.", "The {t} of {n} is {s}.",
         "{n} keeps the {t} {s}.", "{n} has hidden the {t} {s}."),
        (
            Ask(("[Where|where] is the {t}?", "Where did {n} [put|leave|hide] the {t}?",
                 "Where can I find the {t}?", "In which place is the {t}?",
                 "[Tell me where|Can you tell me where|Say where] the {t} is.",
                 "Where [must|should] I look for the {t}?"),
                ("Do you know where the {t} is?", "Say where I can find the {t}."), "{S}."),
            Ask(("[Who|who] [put|left|hid|placed] the {t} {s}?", "Who [put|hid] the {t}?",
                 "[Tell me who|Can you tell me who|Say who] put the {t} {s}.",
                 "Do you know who [left|hid|placed] the {t} {s}?",
                 "Who is it that [put|left] the {t} {s}?"),
                ("Do you know who put the {t} there?", "Who is it that hid the {t}?"), "{n}."),
            Ask(("What is {s}?", "What did {n} [put|leave|hide] {s}?", "[Tell me|Say] what is {s}.",
                 "Which thing is {s}?", "Do you know what is {s}?",
                 "Which thing did {n} [leave|hide] {s}?"),
                ("Can you tell me what is {s}?", "Which thing did {n} put {s}?"), "The {t}."),
        )),
    "likes": Kind(
        ("{n} [likes|loves|eats|wants|enjoys] {f}.", "The favourite food of {n} is {f}.",
         "{n} likes to eat {f}."),
        (
            Ask(("[What|what] does {n} [like|love|eat|want|enjoy]?", "What food does {n} like?",
                 "What does {n} like to eat?", "[Tell me what|Say what] {n} likes.",
                 "What is the favourite food of {n}?", "Which food does {n} like?"),
                ("Can you tell me what {n} likes?", "Say what {n} loves to eat."),
                 "{n} likes {f}."),
            Ask(("[Who|who] [likes|loves|eats|wants|enjoys] {f}?", "Who likes to eat {f}?",
                 "[Tell me who|Can you tell me who|Say who] likes {f}.",
                 "Which person likes {f}?", "Do you know who [eats|enjoys|wants] {f}?",
                 "Who is the one that [eats|enjoys|likes] {f}?"),
                ("Do you know who likes {f}?", "Who is the one that loves {f}?"), "{n}."),
        )),
    "job": Kind(
        ("{n} is {a_j}.", "{n} works as {a_j}.", "{n} [became|is now] {a_j}.",
         "The {j} is called {n}."),
        (
            Ask(("[What|what] is the job of {n}?", "What is {n}'s job?", "What does {n} do?",
                 "[Tell me|Say] what {n} does.", "As what does {n} work?", "What is {n}?",
                 "What kind of work does {n} do?", "[Say|Name] the job of {n}."),
                ("Tell me the job of {n}.", "Say what job {n} has."), "{n} is {a_j}."),
            Ask(("[Who|who] is the {j}?", "Who is {a_j}?", "Who works as {a_j}?",
                 "[Tell me who|Can you tell me who|Say who] the {j} is.",
                 "What is the {j} called?", "What is the name of the {j}?",
                 "Do you know who [works as|is] {a_j}?", "Which person works as {a_j}?"),
                ("Do you know who the {j} is?", "Which person is the {j}?"), "{n}."),
        )),
    "age": Kind(
        ("{n} is {k} years old.", "{n} is {k}.", "{n} turned {k} [today|this year]."),
        (
            Ask(("[How|how] old is {n}?", "What is the age of {n}?", "What is {n}'s age?",
                 "[Tell me|Say] how old {n} is.", "How many years old is {n}?"),
                ("Can you tell me how old {n} is?", "Say the age of {n}."),
                "{n} is {k} years old."),
            Ask(("[Who|who] is {k} years old?", "Who is {k}?",
                 "[Tell me who|Can you tell me who|Say who] is {k} years old.",
                 "Which person is {k} years old?", "Do you know who turned {k}?",
                 "Who is the one that turned {k}?"),
                ("Do you know who is {k} years old?", "Who is the one that is {k}?"), "{n}."),
        )),
    "went": Kind(
        ("{n} [went|walked|ran|drove] to {p} on {d}.", "On {d}, {n} [went|walked|drove] to {p}.",
         "{n} visited {p} on {d}.", "{n} was at {p} on {d}."),
        (
            Ask(("[Where|where] did {n} go?", "Where did {n} go on {d}?", "What did {n} visit?",
                 "[Tell me where|Say where] {n} went.", "To which place did {n} go?",
                 "Where was {n} on {d}?"),
                ("Can you tell me where {n} went?", "Say to which place {n} went."), "To {p}."),
            Ask(("[When|when] did {n} go to {p}?", "On [which|what] day did {n} go to {p}?",
                 "When did {n} go?", "[Tell me|Say] when {n} went to {p}.",
                 "What day did {n} go?", "When was {n} there?"),
                ("Can you tell me when {n} went to {p}?", "Say on which day {n} went."),
                "On {d}."),
            Ask(("[Who|who] went to {p}?", "Who visited {p}?", "Who went to {p} on {d}?",
                 "Who went out on {d}?", "[Tell me who|Say who|Can you tell me who] went to {p}.",
                 "Which person went to {p}?", "Do you know who [visited|was at] {p}?",
                 "Who is the one that [visited|was at] {p}?"),
                ("Do you know who went to {p}?", "Who is the one that went to {p}?"), "{n}."),
        )),
    "gave": Kind(
        ("{n} gave {m} {a_t}.", "{n} gave {a_t} to {m}.", "{m} got {a_t} from {n}.",
         "{n} sent {a_t} to {m}."),
        (
            Ask(("[Who|who] gave {m} {a_t}?", "Who gave away the {t}?", "Who sent the {t}?",
                 "From whom did {m} get the {t}?", "[Tell me who|Say who] gave {m} the {t}.",
                 "Who gave the {t} to {m}?", "Do you know who [gave|sent] {a_t} to {m}?",
                 "Who is it that [sent|gave] the {t} to {m}?"),
                ("Do you know who gave {m} the {t}?", "Who is it that gave away the {t}?"),
                "{n}."),
            Ask(("[Who|who] got the {t}?", "Who got the {t} from {n}?",
                 "To whom did {n} give the {t}?", "Who did {n} give the {t} to?",
                 "[Tell me who|Say who|Can you tell me who] got the {t}.",
                 "Do you know who got {a_t} from {n}?", "Who is the one that got {a_t}?"),
                ("Do you know who got the {t}?", "Who is the one that got the {t}?"), "{m}."),
            Ask(("[What|what] did {n} give [|to ]{m}?", "What did {m} get?",
                 "What did {m} get from {n}?", "[Tell me|Say] what {m} got.",
                 "Which thing did {n} give away?", "What did {n} give away?"),
                ("Can you tell me what {n} gave to {m}?", "Which thing did {m} get from {n}?"),
                "{A_t}."),
        )),
    "pet": Kind(
        ("{n} has {a_ca} named {m}.", "{n}'s {an} is {c} and its name is {m}.",
         "The {ca} of {n} is called {m}."),
        (
            Ask(("[What|what] is the name of the {an}?", "What is {n}'s {an} called?",
                 "What is the {an} called?", "[Tell me|Say] the name of the {an}.",
                 "What is the name of {n}'s {an}?", "Tell me the name of {n}'s {an}.",
                 "How is the {an} called?"),
                ("Tell me what the {an} is called.", "Say the name of {n}'s {an}."), "{m}."),
            Ask(("[Who|who] has {a_an}?", "Who has {m}?", "Whose is the {an}?", "Who owns {m}?",
                 "Who owns the {an}?", "[Tell me who|Say who] has {a_an}.",
                 "Do you know who owns [the {an}|{m}]?", "Who is the owner of {m}?"),
                ("Do you know who has the {an}?", "Who is the owner of the {an}?"), "{n}."),
            Ask(("What animal is {m}?", "What is {m}?", "What [pet|animal] does {n} have?",
                 "What kind of animal is {m}?", "Which animal does {n} have?"),
                ("Tell me what animal {m} is.", "Which animal is {m}?"), "{A_an}."),
            Ask(("What [colour|color] is the {an}?", "What [colour|color] is {m}?",
                 "Which [colour|color] is {n}'s {an}?", "Tell me the colour of {m}.",
                 "What is the colour of the {an}?", "Which colour does the {an} have?"),
                ("Name the colour of the {an}.", "Which colour has {m} got?"), "It is {c}."),
        )),
    "rests": Kind(
        ("The {an} [is|sat|sits|sleeps|slept|hides|lies|rests] {s}.", "{S} [is|sat] {a_an}.",
         "{A_ca} [is|sat|sleeps] {s}."),
        (
            Ask(("[Where|where] is the {an}?",
                 "Where [did|does] the {an} [sit|sleep|hide|lie|rest]?",
                 "[Tell me where|Can you tell me where|Say where] the {an} is.",
                 "In which place is the {an}?", "Where can I find the {an}?"),
                ("Do you know where the {an} is?", "Say where I can find the {an}."), "{S}."),
            Ask(("[Who|What|Which animal] [is|sits|sleeps|sat|hides] {s}?",
                 "[Tell me|Say] [who|what] is {s}.", "Which animal is {s}?",
                 "Do you know who [is|sits|sleeps|hides] {s}?",
                 "Can you tell me which animal is {s}?"),
                ("Can you tell me who is {s}?", "Do you know what animal is {s}?"), "The {an}."),
        )),
    "is": Kind(
        ("The {t} is {c}.", "The colour of the {t} is {c}.", "{n} painted the {t} {c}.",
         "I see {a_ct}."),
        (
            Ask(("[What|what] [colour|color] is the {t}?", "Which [colour|color] is the {t}?",
                 "[Tell me|Say|Name] the [colour|color] of the {t}.",
                 "Which [colour|color] does the {t} have?",
                 "What is the [colour|color] of the {t}?"),
                ("Which colour has the {t} got?", "Can you say the colour of the {t}?"),
                "It is {c}."),
            Ask(("[What|what] is {c}?", "Which thing is {c}?", "[Tell me|Say] what is {c}.",
                 "What has the colour {c}?", "Do you know what is {c}?"),
                ("Can you tell me what is {c}?", "Say which thing is {c}."), "The {t}."),
        )),
}


def fill(bank: words.Bank, names: list[str]) -> dict[str, str]:
    """Draw the slots of one fact; ``names`` are used from the front."""
    thing, colour, animal = bank.thing(0.2), bank.colour(), bank.animal()
    place, spot, job = bank.place().split(" ", 1)[1], bank.spot(), bank.job()
    return {
        "n": names[0], "m": names[1], "t": thing, "c": colour, "y": bank.city(), "s": spot,
        "S": spot[0].upper() + spot[1:], "f": bank.food(), "j": job,
        "k": str(bank.rng.randint(2, 99)),
        "p": place, "d": bank.rng.choice(words.DAYS), "an": animal, "a_j": words.article(job),
        "a_t": words.article(thing), "A_t": words.article(thing).capitalize(),
        "a_ct": words.article(f"{colour} {thing}"),
        "A_ct": words.article(f"{colour} {thing}").capitalize(),
        "ca": f"{colour} {animal}", "a_ca": words.article(f"{colour} {animal}"),
        "a_an": words.article(animal), "A_an": words.article(animal).capitalize(),
        "A_ca": words.article(f"{colour} {animal}").capitalize(),
    }
