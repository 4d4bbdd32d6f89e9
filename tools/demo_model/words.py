"""The words the training text is made of, and those that are kept for the examination."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

GIRLS = (
    "Mia Emma Lily Anna Sara Lucy Zoe Ruby Ella Nina Rosa Maya Ida Jane Kate Amy Eva Lena Tina "
    "Alice Sofia Julia Maria Laura Diana Olivia Hana Layla Amina Priya Yuki Mei Ines Elsa Freya "
    "Greta Heidi Ivy Daisy Molly Polly Sally Penny Jenny Betty Annie Susie Rosie Carla Marta Lola "
    "Stella Bella Tara Vera Wanda Zara Naomi Leah Grace Rachel Helen Pia Fatima Luna Olga"
).split()
BOYS = (
    "Tom Ben Max Sam Leo Jack Finn Noah Liam Paul Peter Mark John David Adam Eric Hugo Theo Otto "
    "Bruno Marco Diego Pablo Omar Ali Ravi Kenji Chen Ivan Boris Karl Hans Emil Oscar Victor Simon "
    "Felix Lucas Daniel Robert James George Henry Charlie Harry Billy Tommy Danny Jimmy Bobby Nick "
    "Rick Will Dan Joe Tim Jim Ned Ted Fred Gus Ian Luke Owen Ryan Sean Kevin Brian Amir Samir"
).split()
THINGS = (
    "ball kite boat key hat book cup box bag bell drum lamp coin ring rope map letter clock "
    "chair table basket bottle brush bucket button candle card coat crown doll door feather "
    "flag flower flute glove hammer horn jacket jar kettle knife ladder leaf mirror net paint pan "
    "pen pencil pillow pipe plate pot puppet puzzle quilt radio rock rocket sail scarf seed shell "
    "shirt shoe sled sock spoon star stick stone string sword tent ticket toy train truck trumpet "
    "umbrella vase violin wagon wheel whistle window wand watch balloon bike camera car chest comb "
    "cart desk fan fork guitar helmet hook cage magnet marble mask medal needle notebook paddle "
    "piano pin ribbon robot saw stamp stool tower tray wallet yarn bench torch spade"
).split()
ANIMALS = (
    "dog cat fox bear rabbit mouse bird frog duck horse cow pig goat hen owl wolf lion tiger "
    "monkey turtle fish whale snake bee ant goose sheep squirrel deer mole crow dragon pony "
    "puppy kitten parrot penguin elephant crab seal"
).split()
FOODS = (
    "pizza soup bread cheese rice apples cake pears plums grapes honey milk tea jam eggs pasta "
    "salad nuts beans corn carrots cookies fish pie butter oranges bananas cherries lemons "
    "noodles toast yogurt peas melon chocolate pancakes potatoes berries juice popcorn"
).split()
COLOURS = "red blue green yellow white black brown pink orange gold silver grey".split()
JOBS = (
    "teacher doctor baker farmer pilot singer painter writer cook nurse driver sailor tailor "
    "builder dancer judge gardener hunter miner king queen actor fisher guard potter clown "
    "soldier waiter lawyer dentist"
).split()
CITIES = (
    "Paris London Rome Berlin Madrid Tokyo Oslo Vienna Lisbon Dublin Athens Cairo Delhi Lima "
    "Boston Chicago Denver Dallas Miami Seattle Toronto Sydney Prague Warsaw Helsinki Moscow Milan "
    "Naples Venice Munich Hamburg Lyon Nice Geneva Zurich Basel Brussels Ghent Porto Seville "
    "Istanbul Nairobi Lagos Accra Tunis Mumbai Bangkok Hanoi Seoul Osaka Kyoto Manila Jakarta "
    "Perth Austin Houston Phoenix Detroit Quito Bogota Havana Riga Leeds York Bath"
).split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
SKIES = "sunny rainy cloudy windy snowy stormy foggy clear warm cold hot dry wet".split()
PLACES = (
    "in the garden|at the beach|on the hill|in the park|in the forest|at the lake|in the village|"
    "at the market|on the farm|in the kitchen|at the school|in the barn|by the river|in the town|"
    "in the meadow|on the bridge|in the cave|in the library|at the station|in the yard|"
    "in the attic|on the island|in the field|at the harbour|in the castle|at the mill|"
    "in the shop|at the pond|in the valley|on the roof|in the cellar|at the zoo|in the desert|"
    "in the bakery|on the shore|at the theatre"
).split("|")
SPOTS = (
    "in the box|in the bag|under the bed|on the table|on the shelf|in the drawer|behind the door|"
    "under the chair|in the basket|on the desk|in the kitchen|in the garden|in the car|"
    "under the tree|behind the sofa|next to the lamp|in the pot|on the floor|on the roof|"
    "in the barn|beside the stove|in the cupboard|under the rug|in the jar|near the window|"
    "in the chest|in the hall|on the bench|behind the curtain|inside the tent"
).split("|")

HELD_GIRLS = (
    "Clara Nora Paula Monica Sonia Linda Gloria Hilda Petra Rita Thea Viola Bianca Claudia Elena "
    "Flora Ingrida Camilla Jessica Martina"
).split()
HELD_BOYS = (
    "Arthur Martin Albert Edgar Gavin Conrad Stefan Walter Norman Rupert Gordon Colin Marcus "
    "Vincent Dustin Alan Edwin Roland Nelson Tobias"
).split()
HELD_THINGS = (
    "lantern compass blanket hat-stand telescope anchor barrel bowl carpet dice envelope goggles "
    "harp kayak locket napkin pearl raft statue thimble trophy backpack bracelet saddle"
).replace("hat-stand ", "").replace("dice ", "").replace("goggles ", "").split()
HELD_ANIMALS = "badger camel donkey otter hamster lizard panda raven".split()
HELD_FOODS = "spinach waffles mangoes olives tofu cabbage dumplings raisins".split()
HELD_COLOURS = "purple violet".split()
HELD_JOBS = "plumber mechanic librarian carpenter butcher".split()
HELD_CITIES = (
    "Krakow Malmo Turin Bergen Kobe Lusaka Tampere Granada Bremen Utrecht Salem Tulsa Dakar "
    "Medellin Antwerp"
).split()
HELD_SPOTS = (
    "behind the bookcase|inside the oven|under the pillow-case|on the balcony|in the wardrobe|"
    "near the fireplace"
).replace("|under the pillow-case", "").split("|")
HELD_PLACES = (
    "in the museum|at the airport|in the tunnel|in the orchard|on the glacier|at the stadium"
).split("|")
HELD_WORDS = frozenset(
    word.lower()
    for text in (
        HELD_GIRLS + HELD_BOYS + HELD_THINGS + HELD_ANIMALS + HELD_FOODS + HELD_COLOURS
        + HELD_JOBS + HELD_CITIES + [spot.split()[-1] for spot in HELD_SPOTS + HELD_PLACES]
    )
    for word in [text]
)

# The names of whom the stories say she or he unasked: few, so that the network knows them all.
COMMON_GIRLS = "Mia Emma Lily Anna Sara Lucy Zoe Ruby Ella Nina Rosa Maya Jane Kate Alice".split()
COMMON_BOYS = "Tom Ben Max Sam Leo Jack Finn Noah Liam Paul Peter Mark John David Adam".split()
# More real names, for the later training.
MORE_GIRLS = (
    "Angela Barbara Carmen Dora Erika Francesca Gina Helena Irena Johanna Katrina Lydia Melinda "
    "Nadia Ophelia Patricia Ramona Sabrina Teresa Ursula Valeria Wilma Xenia Yvonne Isabella "
    "Gabriella Christina Matilda Brenda Veronica Susanna Alexandra Adele Agatha Amanda Antonia "
    "Astrid Beatrice Caroline Cecilia Charlotte Chloe Daniela Debora Delia Dorothea Edith Eliza "
    "Elisabeth Emilia Estella Eugenia Felicia Fiona Frida Georgia Hanna Harriet Hermina Ingrid "
    "Iris Isadora Jasmin Josephine Judith Karina Larissa Leonora Lilian Louisa Lucinda Magda "
    "Marina Marion Melissa Miranda Mona Nicola Norma Odessa Pamela Regina Rebecca Romina Rosalinda "
    "Roxana Selma Silvia Simona Stefania Tamara Tatiana Vanessa Victoria Virginia Viviana"
).split()
MORE_BOYS = (
    "Alfred Bernard Clement Dennis Edward Ferdinand Gerard Harold Isaac Julian Kurt Leonard "
    "Matthias Nathan Oliver Philip Quentin Richard Sebastian Thomas Ulrich Valentin William Xavier "
    "Anton Anders Andrew Augustin Austin Axel Barnard Bastian Benedict Benjamin Bertrand Calvin "
    "Christian Clarence Clinton Cornelius Damian Derek Dominic Donald Dorian Douglas Duncan Edmund "
    "Edison Elias Elliot Ernest Erwin Eugene Evan Fabian Florian Francis Franklin Gilbert Gregor "
    "Gustav Hector Herbert Herman Howard Hubert Jason Jasper Jeremias Jonas Jordan Joseph Kaspar "
    "Kelvin Konstantin Lambert Laurent Lawrence Lorand Lukas Magnus Malcolm Marlon Mason Maurice "
    "Melvin Morton Nicolas Nolan Orlando Osbert Patrick Quincy Ralph Raymond Reginald Roderick "
    "Roman Ronald Rudolf Samson Sheldon Sigmund Silas Spencer Stanley Stephen Sven Terence Trevor "
    "Tristan Victorin Wesley Wilbert Willard Winston Wolfgang"
).split()
# What the generators draw, as single words: everything that an answer may have to copy.
DRAWN = frozenset(
    word.lower()
    for text in (THINGS + ANIMALS + FOODS + COLOURS + JOBS + SKIES
                 + [where.split()[-1] for where in PLACES + SPOTS])
    for word in [text]
)
_GIRL_ENDS = "a a a ia ina ena ara illa issa ica inda anna ella ette ine ora ilda ie".split()
_BOY_ENDS = (
    "o us er an ok im ed or on in ert ard and ald el ent ias as ur ar ian win vin son ton ford ick"
).split()

_ONSETS = "b c d f g h j k l m n p r s t v w z br dr fl gr kl pl sh st th tr ch sk".split()
_VOWELS = "a e i o u a e i o ai ea oo".split()
_CODAS = "b d g k l m n p r s t x nd rk st ll".split()
_MORE_ONSETS = (
    "b c d f g h j k l m n p r s t v w y z br bl cl cr dr dw fl fr gl gr kn ph pl pr qu sc sl sm "
    "sn sp spr squ st str sw thr tr tw wh wr sh ch th x"
).split() + [""] * 6
_MORE_VOWELS = "a e i o u a e i o u a e y ai ea oo ee ou ie au oi ow oa ei io ia ue ui".split()
_MORE_CODAS = (
    "b c d f g h k l m n p r s t x z nd rk st ll mp ng ck sh ch rt lt nt ft pt ss ff tt zz ct lm "
    "rm rn sk sp th dge tch nch ble tle gle nk rd ld ge ce ve se"
).split() + [""] * 20
_LETTERS = "aaabbccddeeeeffgghhiiijkkllmmnnoooppqrrrssstttuuvwxyz"


def is_held(text: str) -> bool:
    """Whether a made-up word or number pair belongs to the examination."""
    return zlib.crc32(text.lower().encode()) % 10 == 0


def pseudo_word(rng: random.Random, ending: str = "any", held: bool = False) -> str:
    """A pronounceable lower-case word that means nothing; ``held`` picks the examination's."""
    while True:
        word = ""
        for _ in range(rng.choice((1, 1, 1, 2))):
            word += rng.choice(_ONSETS) + rng.choice(_VOWELS)
        word += rng.choice(_ONSETS)
        if ending == "girl":
            word += rng.choice(("a", "a", "ia", "ina", "ie"))
        elif ending == "boy":
            word += rng.choice(("o", "us", "er", "an", "ok", "im", "ed", "or"))
        else:
            word += rng.choice(_VOWELS) + rng.choice(_CODAS)
        if is_held(word) == held and word not in HELD_WORDS and len(word) <= 10:
            return word


def rich_word(rng: random.Random, ending: str = "any") -> str:
    """A lower-case word that means nothing, with more letters beside each other than above."""
    while True:
        if rng.random() < 0.1:
            word = "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 7)))
        else:
            word = "".join(
                rng.choice(_MORE_ONSETS) + rng.choice(_MORE_VOWELS) + rng.choice(_MORE_CODAS)
                for _ in range(rng.choice((1, 2, 2, 3)))
            )
        if ending == "girl":
            word += rng.choice(("a", "a", "ia", "ina", "ie"))
        elif ending == "boy":
            word += rng.choice(("o", "us", "er", "an", "ok", "im", "ed", "or", "n", "rd", "s"))
        if 3 <= len(word) <= 10 and not is_held(word) and word not in HELD_WORDS:
            return word


def piece_word(rng: random.Random, pieces: tuple[str, ...]) -> str:
    """A lower-case word of two or three of the vocabulary's pieces."""
    while True:
        word = "".join(rng.choice(pieces) for _ in range(rng.choice((2, 2, 2, 3)))).lower()
        if 3 <= len(word) <= 11 and not is_held(word) and word not in HELD_WORDS:
            return word


def name_word(rng: random.Random, girl: bool) -> str:
    """A made-up name in lower case, with an ending that real names have."""
    while True:
        word = rng.choice(_ONSETS) + rng.choice(_VOWELS) if rng.random() < 0.5 else ""
        word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ONSETS)
        word += rng.choice(_GIRL_ENDS if girl else _BOY_ENDS)
        if not is_held(word) and word not in HELD_WORDS and len(word) <= 10:
            return word


@dataclass(frozen=True)
class Name:
    """A person's name and whether the stories say she or he."""

    text: str
    girl: bool


class Bank:
    """Draws words: the training's, or with ``held`` the ones that training never sees.

    Late in the training more of the words are made up and they are stranger (``late``), so that
    the network copies any spelling and does not lean on the words it knows; some are put together
    from ``pieces``, the vocabulary's, since a token that is never copied cannot be.
    """

    def __init__(
        self, rng: random.Random, held: bool = False, late: bool = False,
        pieces: tuple[str, ...] = (),
    ) -> None:
        self.rng = rng
        self.held = held
        self.late = late
        self.pieces = pieces

    def made_up(self, ending: str = "any") -> str:
        """A word that means nothing."""
        if self.late:
            kind = self.rng.random()
            if kind < 0.3 and self.pieces:
                return piece_word(self.rng, self.pieces)
            if kind < 0.6:
                return rich_word(self.rng, ending)
        return pseudo_word(self.rng, ending, self.held)

    def name(self, pseudo: float = 0.5) -> Name:
        """A first name, made up with the given chance."""
        girl = self.rng.random() < 0.5
        if self.rng.random() < pseudo:
            if self.late and self.rng.random() < 0.4:
                return Name(name_word(self.rng, girl).capitalize(), girl)
            word = self.made_up("girl" if girl else "boy")
            return Name(word.capitalize(), girl)
        if self.held:
            return Name(self.rng.choice(HELD_GIRLS if girl else HELD_BOYS), girl)
        if self.late and self.rng.random() < 0.4:
            return Name(self.rng.choice(MORE_GIRLS if girl else MORE_BOYS), girl)
        return Name(self.rng.choice(GIRLS if girl else BOYS), girl)

    def names(self, count: int) -> list[Name]:
        """Distinct first names."""
        found: list[Name] = []
        while len(found) < count:
            name = self.name()
            if all(name.text != other.text for other in found):
                found.append(name)
        return found

    def common_name(self) -> Name:
        """One of the few names of whom the stories say she or he unasked."""
        girl = self.rng.random() < 0.5
        return Name(self.rng.choice(COMMON_GIRLS if girl else COMMON_BOYS), girl)

    def _noun(self, train: list[str], held: list[str], pseudo: float, late: float = 0.4) -> str:
        if self.rng.random() < (max(late, pseudo) if self.late else pseudo):
            return self.made_up()
        return self.rng.choice(held if self.held else train)

    def thing(self, pseudo: float = 0.25) -> str:
        """A thing one can hold."""
        return self._noun(THINGS, HELD_THINGS, pseudo)

    def animal(self) -> str:
        """An animal."""
        return self._noun(ANIMALS, HELD_ANIMALS, 0.1)

    def food(self) -> str:
        """Something to eat or drink."""
        return self._noun(FOODS, HELD_FOODS, 0.15)

    def colour(self) -> str:
        """A colour; examination colours are mixed with known ones."""
        if self.held and self.rng.random() < 0.7:
            return self.rng.choice(COLOURS)
        return self._noun(COLOURS, HELD_COLOURS, 0.0 if self.held else 0.08, 0.25)

    def job(self) -> str:
        """An occupation."""
        return self._noun(JOBS, HELD_JOBS, 0.1)

    def city(self) -> str:
        """A city, half of them made up."""
        return self._noun(CITIES, HELD_CITIES, 0.5).capitalize()

    def place(self) -> str:
        """A place with its preposition, such as ``in the garden``."""
        return self._where(PLACES, HELD_PLACES)

    def spot(self) -> str:
        """Where a thing may lie, such as ``under the bed``."""
        return self._where(SPOTS, HELD_SPOTS)

    def _where(self, train: list[str], held: list[str]) -> str:
        if self.rng.random() < (0.35 if self.late else 0.2):
            side = self.rng.choice(("in", "under", "behind", "on", "near"))
            return f"{side} the {self.made_up()}"
        return self.rng.choice(held if self.held else train)


def article(noun: str) -> str:
    """The noun with ``a`` or ``an``."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
