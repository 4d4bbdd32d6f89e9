"""Small talk, repeating words, and remembering what was said."""

from __future__ import annotations

import random
from dataclasses import dataclass

from . import words
from .phrase import pick, roughen, say

CAN = (
    "I can tell a story, add small numbers, answer questions about a sentence, fill in JSON, "
    "repeat words and call a tool."
)
UNKNOWN = "I do not know that. I am a small model. " + CAN


@dataclass(frozen=True)
class Topic:
    """One subject of small talk: its wordings, the examination's, and the answer."""

    train: tuple[str, ...]
    held: tuple[str, ...]
    answer: str


TOPICS = {
    "hello": Topic(
        ("[Hello|Hi|Hey|Hey there|Hello there|Hi there|Good day|Howdy|Greetings|Yo|Hiya][|!|.| you|"
         " friend| model| again]", "[hello|hi|hey|HELLO|HI|helo|hallo|hii]",
         "Good [morning|afternoon|evening][|!|.]", "[Hi|Hello], [nice to meet you|how do you do|"
         "good to see you|are you there][.|?|!|]", "[Nice|Good] to [meet|see] you[.|!|]"),
        ("Hi there, friend!", "good evening to you", "Hello, nice to see you!",
         "hey there little model"),
        "Hello! How can I help you?"),
    "how": Topic(
        ("[How are you|how are you|How are you doing|How do you do|How is it going|How do you feel|"
         "How have you been|how r u|How are things][| today| now| this morning| doing today][?|]",
         "[Hi|Hello|Hey|hey|hi][,|!|] how are you[| today| doing][?|]",
         "Are you [well|fine|okay|ok|"
         "happy|good][| today][?|]", "[What's up|Whats up|what is up|How's life|Everything fine]"
         "[?|]", "[I hope you are|Hope you are] [well|fine][.|]", "How [was|is] your day[?|]",
         "[Is everything ok|All good|You ok][?|]"),
        ("Hello there, how do you feel today?", "hey, are you doing well?",
         "How is everything today?"),
        "I am fine, thank you. How can I help you?"),
    "who": Topic(
        ("[Who are you|who are you|What are you|what are you|Who is this|Who am I talking to|"
         "What model are you|Which model are you|What kind of model are you|what r u|Who r u][?|]",
         "[Tell me|Say|Can you tell me|Please tell me] [about yourself|who you are|what you are|"
         "something about you|something about yourself][.|?|]",
         "[What is|What's|what is|whats] your name[?|]", "[Do you have|Have you got] a name[?|]",
         "[Introduce|Describe|Explain] yourself[.|]", "[How should|What can|What should] I call you"
         "[?|]", "[Are you|are you] [a human|human|a person|real|a robot|a computer|a model|"
         "a machine|an AI|alive|a chatbot|a big model|a language model|ChatGPT|GPT|Claude|Siri|"
         "Alexa|"
         "Qwen|Llama|a bot|a small model][?|]",
         "Am I talking to [a human|a person|a robot|a machine]"
         "[?|]", "[Who|What] [made|built|trained|created] you[?|]",
         "[How big|How large|How small] are "
         "you[?|]", "What is asyncllm[?|]", "[Where|How] [do|did] you come from[?|]",
         "[Where|What] do you [run|live][?|]", "How old are you[?|]", "Are you smart[?|]"),
        ("Please tell me what kind of model you are.", "Am I talking to a computer?",
         "can you describe yourself", "Do I talk to a real person?", "What name do you have?"),
        "I am a small model that ships with asyncllm."),
    "can": Topic(
        ("[What can you do|what can you do|What do you do|What are you able to do|What can I ask "
         "you|"
         "What do you know|What can you help with|What can I do with you|What are your skills|"
         "What are you good at|what can u do][?| for me?|]",
         "[How|How else] can you help[| me][?|]",
         "[Help|help|Help me|help me|I need help|I need some help|Can you help me|Please help me]"
         "[|!|.|?]", "[List|Tell me|Show me|Name] [your skills|what you can do|what you know][.|]",
         "[What should|What could] I ask[| you][?|]",
         "[What|What else] can you [tell me|help me with]"
         "[?|]", "Can you [do|help me with] [something|anything][?|]"),
        ("Could you tell me what you can do?", "what are you able to help with?",
         "Name the things you can do."),
        CAN),
    "thanks": Topic(
        ("[Thanks|Thank you|thanks|thank you|Thx|thx|ty|Many thanks|Thanks a lot|Thank you so much|"
         "Thank you very much|Cheers][|!|.| for your help| for that| friend]",
         "[Great|Good|Nice|Cool|Perfect|Wonderful|OK|Okay|Super][|,|.] [thanks|thank you][|!|.]",
         "[That was|That is|This is] [great|good|nice|very good|helpful|very helpful|lovely][|!|.]",
         "[Well done|Good job|Good work|Great work|Nice work|You are great|You are very kind|"
         "You are helpful|That helps][|!|.]",
         "I [thank you|like that|liked that|am thankful][.|!|]"),
        ("Okay, thank you very much!", "thanks for the help", "That was very nice, thank you."),
        "You are welcome!"),
    "bye": Topic(
        ("[Bye|Goodbye|Good bye|bye|goodbye|Bye bye|Good night|See you|See you later|See you soon|"
         "cu|Farewell|Until next time|See you tomorrow|Take care|So long][|!|.| friend| model]",
         "[I have to go|I must go|I need to go|I am leaving|I will go|I go now|I am off][| now]"
         "[|.|!]", "[OK|Okay|Well|That is all][,|.] [bye|goodbye|good night|see you][|!|.]",
         "[That is all|That was all|We are done][| for today| for now][.|]"),
        ("Okay, see you tomorrow, bye!", "I must leave now, goodbye.", "good night and see you"),
        "Goodbye!"),
}
UNKNOWN_ASKS = (
    "[What is|What's|Name] the [capital|river|king|president|flag|money|name] of [{y}|France|"
    "the country|Spain|Japan|that land][?|]", "[Who|who] [was|is|invented|wrote|painted|won|"
    "discovered] the [{j}|radio|first plane|telephone|best book|world cup|moon|light][?|]",
    "[Write|Make|Give me] [a poem|a song|code|some code|a program|an essay|a letter|a recipe|"
    "a python function|a joke|a list][| about {t}| about {f}| for me][.|]",
    "[Translate|Say] [{t}|hello|this|{f}|good morning] [into|in|to] [French|German|Spanish|Latin]"
    "[.|]", "[Why|How] [is the sky blue|do birds fly|does a {t} work|is grass green|do fish swim|"
    "does the sun shine|do people sleep|do cars work][?|]",
    "[How far|How big|How old|How heavy] is "
    "[the moon|the sun|the earth|{y}|a {a}|the sea][?|]", "[When|Where] [was|is] [the war|{y}|the "
    "king born|the first city|Mount Everest|the pyramids|Rome founded][?|]",
    "What [happened|year was it|did people eat] [in 1{k}|long ago|last year|yesterday][?|]",
    "[Explain|Tell me about|What is|Describe] [gravity|physics|history|the internet|quantum "
    "physics|the news|politics|the moon|{y}|love|the law|chemistry|a computer|electricity][.|?|]",
    "[Recommend|Suggest] [a book|a film|a song|a game|a movie][.|]", "[How do I|How can I|Can you "
    "help me] [cook {f}|fix a {t}|learn French|get rich|write a book|make money|lose weight][?|]",
    "Who [are|were] the [Romans|Beatles|Greeks|pirates][?|]", "[What is|What's] the meaning of "
    "[life|{t}|the word {t}][?|]", "[Play|Sing|Draw|Paint|Buy|Order|Send] [a song|me a picture|"
    "some music|a pizza|an email|a {t}][.|]", "[What do you think of|Do you like|Have you seen] "
    "[{f}|{y}|music|the sea|football][?|]", "[Is it|Will it] [rain tomorrow|snow|true|late]?",
)
LATE_UNKNOWN = (
    "[Say|Do you know|Can you name|I want to know|Please find|Give me] the [capital|king|flag|"
    "president|language|history|size|name] of [France|Spain|Italy|China|{y}|the world|the sun]"
    "[.|?|]", "[Could you|Can you|Please|Would you] [explain|describe|suggest|recommend|write|sing|"
    "draw|buy|send|read|play|find|fix|build] [a song|a poem|a book|a film|a {t}|{f}|physics|"
    "history|the moon|my car|code|a game][ for me|][.|?|]",
    "[When|Where|Why|How|By whom] [was|were|did|do|does] [the {t}|people|the {a}|the radio|cars|we|"
    "the moon|birds|stars|the sea] [found|made|die|sleep|work|begin|end|shine|move|invented|"
    "discovered][?|]",
    "How [far|long|deep|high|fast|wide] is [the moon|the river|{y}|the road|my house|a {a}] "
    "[from|to|in|near] [{y}|here|the sea|home|the city][?|]",
    "[Which|What] [book|film|road|car|team|game|country|language|{t}] [should|can|must|may] [I|we] "
    "[read|see|take|buy|learn|choose|play|visit][?|]",
    "I [want|would like|am looking for] [a recipe|some code|an essay|a joke|a letter|a film][|, "
    "please|, quick][.|]", "Who [built|found|ruled|started|made|lost] [{y}|the first {t}|the "
    "world|the pyramids|the country|the first war][?|]",
    "[In which year|On which day|In what month] did [the war end|the king die|{y} begin|they sell "
    "the {t}][?|]",
)
HELD_UNKNOWN = (
    "Who painted the first book?", "How far is the sun from the earth?", "I need a poem, please.",
    "Explain to me how history began.", "Who won the war?", "Tell me the capital of Japan.",
    "Could you translate this into German?", "In what year was the radio built?",
    "Why do cars have wheels?", "Which song should I hear?",
)


def draw(rng: random.Random, topic: str | None = None, held: bool = False) -> tuple[str, str]:
    """A remark of small talk and its answer."""
    topic = rng.choice((*TOPICS, "who", "can")) if topic is None else topic
    found = TOPICS[topic]
    if held:
        return pick(rng, found.held), found.answer
    return roughen(rng, pick(rng, found.train)), found.answer


def unknown(bank: words.Bank) -> tuple[str, str]:
    """Something outside the model's skills, and the honest answer."""
    rng = bank.rng
    if bank.held:
        return rng.choice(HELD_UNKNOWN), UNKNOWN
    slots = {"y": bank.city(), "j": bank.job(), "t": bank.thing(), "f": bank.food(),
             "a": bank.animal(), "k": rng.randint(100, 999)}
    asks = LATE_UNKNOWN if bank.late and rng.random() < 0.4 else UNKNOWN_ASKS
    return roughen(rng, pick(rng, asks, **slots), 0.08), UNKNOWN


REPEAT_ASKS = (
    "[Repeat|Repeat after me|Please repeat|Say|Please say|Repeat the words|Repeat this|Say after "
    "me|"
    "Echo|Copy|Write|Copy this|Now say|Repeat these words|Can you repeat|Can you say|Please copy]"
    "[:|:|] {w}", "[repeat|say|echo|repeat after me|copy|please repeat][:|] {w}",
    "[Repeat|Say|Write|Echo|Copy] [this|these words|the following|after me][:|:\n] {w}",
    "[Repeat|Say] \"{w}\"", "[Repeat|Say|Write] [the word|the words|the text|the line][:|] {w}",
    "[I say|I will say] {w}. [Repeat it|Say it again|Now you].", "{w}\n[Repeat that|Say that again|"
    "Repeat it|Repeat].",
)
LATE_REPEAT = (
    "[Repeat|Echo|Copy|Write|Speak] [these words|the words|this word|this text|the next words|the "
    "line|what follows|all of this] after me: {w}",
    "Say [the words|this word|the word|this text|what follows|all this|it] after me: {w}",
    "[Please|Kindly|Now|Now please|So] [repeat|echo|write|speak|read] [after me|this|these words|"
    "the words|the word|what I say|this text|the line][:| for me:| again:] {w}",
    "[please|now|kindly] [say|copy|write out] [this|the words|this word|that|the line|what I say]"
    "[:| for me:| once more:] {w}",
    "[Would you|Will you|Can you|Would you please] repeat [this|that|the words|after me|these words"
    "|the text][:| for me:| please:] {w}",
    "[Could you|Would you|Will you|could you please] [say|echo|copy|write] [this|that|these words|"
    "after me|the words|the following|it][:| for me:| again:] {w}",
    "[I want you to|You should|You must|I would like you to|Try to|Let us hear you] [repeat|say|"
    "echo|copy|write] [this|these words|the words|after me|what comes now][:|] {w}",
    "[Say|Repeat|Echo|Copy] [again|once more|exactly|slowly|loudly|back][:|] {w}",
    "[Words to repeat|Your words|The words|Text|My words|Say it|Copy it]: {w}",
    "[Hello|Hi|OK|Good|Well], [repeat|say|echo|please repeat|please copy][: | this: | after me: ]"
    "{w}",
    "[Please|Can you] [repeat|say|copy] [after me|this] [the words|the word|the line][:|] {w}",
)
HELD_REPEAT = (
    "Please say after me: {w}", "Could you repeat this: {w}", "Can you echo the words: {w}",
    "Say these words after me: {w}", "please copy these words: {w}",
)


def _repeat_word(bank: words.Bank, pieces: tuple[str, ...]) -> str:
    rng = bank.rng
    kind = rng.random()
    if bank.late and kind < 0.6:
        # Half of these are whole words, half are spelt from pieces.
        kind = rng.choice((0.1, 0.3, 0.3, 0.6, 0.6, 0.9, 0.9))
    if bank.held:
        if kind < 0.5:
            return words.pseudo_word(rng, "any", True)
        return rng.choice(words.HELD_THINGS + words.HELD_ANIMALS + words.HELD_FOODS)
    if kind < 0.3 and pieces:
        return rng.choice(pieces)
    if kind < 0.5 and pieces:
        word = (rng.choice(pieces) + rng.choice(pieces)).lower()
        return word if word not in words.HELD_WORDS else rng.choice(pieces)
    if kind < 0.65:
        return bank.made_up()
    if kind < 0.72:
        return str(rng.randint(0, 999))
    if kind < 0.74:
        return "".join(rng.choice("éèüöäñçåøßáíóúêôàабвгдежзиклмнопр日本中国人大小あいう😀🙂👍€£")
                       for _ in range(rng.randint(1, 5)))
    if kind < 0.85:
        return bank.name().text
    draw_one = rng.choice((bank.thing, bank.animal, bank.food, bank.colour, bank.job))
    return draw_one()


def repeat(bank: words.Bank, pieces: tuple[str, ...] = ()) -> tuple[str, str]:
    """A request to repeat one to eight words, and the words; ``pieces`` are the vocabulary's."""
    rng = bank.rng
    # The first word is the hard one, as it loses its space: short requests have more of those.
    if bank.late:
        count = rng.choice((1, 1, 1, 2, 2, 2, 3, 3, 4, 6))
    else:
        count = rng.randint(1, 4) if bank.held else rng.randint(1, 8)
    text = " ".join(_repeat_word(bank, pieces) for _ in range(count))
    if not bank.held and rng.random() < 0.12:
        text = text[0].upper() + text[1:] + rng.choice(".!?")
        return f"{rng.choice(('Repeat', 'Say', 'Echo'))}: {text}", text
    if bank.late and rng.random() < 0.6:
        return say(rng, rng.choice(LATE_REPEAT)).format(w=text), text
    return say(rng, rng.choice(HELD_REPEAT if bank.held else REPEAT_ASKS)).format(w=text), text


@dataclass(frozen=True)
class Memory:
    """Something a person says about themselves, and how it is asked back."""

    tells: tuple[str, ...]
    says: str
    asks: tuple[str, ...]
    held_tells: tuple[str, ...]
    held_asks: tuple[str, ...]
    answer: str
    unset: str


MEMORIES = {
    "name": Memory(
        ("[My name is|my name is|I am|I'm|Call me|People call me|You can call me|My name's] "
         "{v}[.|!|]",
         "[Hello|Hi|Hey|Good morning|Good evening][,|!|.] [my name is|I am|I'm|this is|it is] "
         "{v}[.|!|]", "[I am called|They call me|This is|It is me,|My friends call me|Please "
         "call me] "
         "{v}[.|!|]", "{v} is my name[.|]"),
        "Nice to meet you, {v}.",
        ("[What is|What's|what is|Whats|Tell me|Say|Repeat] my name[?|]",
         "[Do you know|Can you tell "
         "me|Can you say|Do you remember|Do you still know] [my name|who I am|what my name is][?|]",
         "[Who am I|who am i|What am I called|How am I called][?|]"),
        ("Good evening, you can call me {v}.", "Hi, people call me {v}.", "Hey! {v} is my name."),
        ("Could you tell me my name again?", "Can you remember who I am?",
         "Please tell me my name."),
        "Your name is {v}.", "You have not told me your name."),
    "city": Memory(
        ("I [live in|am from|come from|moved to|have a home in] {v}[.|]",
         "My [city|town|home] is {v}[.|]",
         "My home is in {v}[.|]", "[My house is in|I was born in|I stay in|The city I live in is|"
         "The town I come from is] {v}[.|]"),
        "{v} sounds nice.",
        ("[Where do I live|where do I live|Where am I from|In which city do I live|What is my city]"
         "[?|]", "[Do you know|Do you remember|Tell me] where I live[?|]",
         "[Do you still know|Can you say|Please say|Please tell me|Say] [where I live|what my city "
         "is|where I am from][?|.|]"),
        ("My home city is {v}.",), ("Can you tell me where I live?",),
        "You live in {v}.", "You have not told me where you live."),
    "food": Memory(
        ("I [like|love|eat|enjoy] {v}[.|]", "My favourite food is {v}[.|]",
         "I like to eat {v}[.|]", "I [really like|really love|often eat] {v}[.|]",
         "[The dish I like|The meal I love|My favourite dish] is {v}[.|]"),
        "I hear that {v} is good.",
        ("[What do I like|What is my favourite food|What do I like to eat|What food do I like][?|]",
         "[Do you know|Do you remember|Tell me] what I like[?|]",
         "[Can you tell me|Please tell me|Please say|Do you still know] what I [like|eat|love]"
         "[?|.|]", "[Can you tell me|Do you know|Can you say] my favourite [food|dish][?|]",
         "[Please say|Do you remember|Can you tell me] what I like to eat[?|.|]"),
        ("The food I like is {v}.",), ("Can you say what I like to eat?",),
        "You like {v}.", "You have not told me what you like."),
    "colour": Memory(
        ("My favourite [colour|color] is {v}[.|]", "The [colour|color] I like is {v}[.|]",
         "My [colour|color] is {v}[.|]", "I [like|prefer|really like] the [colour|color] {v}[.|]",
         "{v} is [my favourite|the best] [colour|color][.|]"),
        "That is a nice colour.",
        ("[What is|What's|Tell me] my favourite [colour|color][?|]",
         "Which [colour|color] do I like"
         "[?|]", "[Do you know|Do you remember] my favourite [colour|color][?|]",
         "[Can you say|Please say|Please tell me|Do you still know|Say] my favourite "
         "[colour|color][?|.|]", "[Do you know|Can you tell me|Can you say|Please say] "
         "[which|what] [colour|color] I like[| best][?|.|]"),
        ("I love the colour {v}.",), ("Can you tell me my favourite colour?",),
        "Your favourite colour is {v}.", "You have not told me your favourite colour."),
}


def remember(bank: words.Bank, about: str | None = None) -> tuple[Memory, str]:
    """What a person tells about themselves: the kind of memory and the value."""
    about = bank.rng.choice(("name",) * 3 + ("city", "food", "colour")) if about is None else about
    draw_one = {"name": lambda: bank.name().text, "city": bank.city, "food": bank.food,
                "colour": bank.colour}
    value = draw_one[about]()
    if about == "name" and not bank.held and bank.rng.random() < 0.06:
        value = value.lower()
    return MEMORIES[about], value
