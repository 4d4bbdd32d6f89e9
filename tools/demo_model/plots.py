"""Sentences of the stories, plot by plot; every line is one sentence in a few wordings.

A name alone does not tell whether its owner is a she or a he. So {he} and {He} stand
only where the name reads as well, and {his} and {him} stand nowhere.
"""

from __future__ import annotations

OPENINGS = (
    "Once upon a time there was a [little|young|kind|brave|happy|clever] {kind} named {H}.",
    "Once upon a time there [was|lived] a {kind} named {H}.",
    "Once upon a time, a [little|young|kind|brave|happy|clever] {kind} named {H} lived near {p}.",
)

_LOST = (
    "{H} had {a_t} and [loved it very much|took it everywhere|played with it every day].",
    "One [sunny|windy|cold|bright|quiet] [morning|day|afternoon], {H} [went to|walked to|ran to] "
    "{p} and lost the {t}.",
    "{He} looked [high and low|everywhere|here and there], but the {t} was [gone|nowhere to be "
    "seen].",
    "{H} sat down and [began to cry|felt very sad|did not know what to do].",
    "Then {a_pal} came [by|along|down the path] and asked, \"[Why are you so sad|What is wrong|"
    "Can I help you], {H}?\"",
    "\"I lost my {t},\" said {H}. \"I [cannot|can not] find it [anywhere|at all].\"",
    "\"[Do not worry|Do not be sad|Come with me],\" said {pal}. \"[We will look together|We can "
    "look for it together|Two can see more than one].\"",
    "They looked [under every tree|behind every stone|in every corner] until {pal} saw "
    "[something in the grass|something shine|something small].",
    "It was the {t}! {H} [jumped for joy|laughed out loud|was so glad] and [hugged {pal}|thanked "
    "{pal} again and again].",
)
_FOUND = (
    "One [sunny|windy|cold|bright|quiet] [morning|day|afternoon], {H} found {a_t} {at_p}.",
    "\"[Whose {t} is this|Who lost this {t}|Where does this {t} come from]?\" {he} [asked|said].",
    "{H} [liked it very much|wanted to keep it|thought it was lovely], but [somebody had lost it|"
    "it belonged to somebody else|somebody had to be sad without it].",
    "So {he} [picked it up|took it|held it tight] and went to [find the owner|ask everyone].",
    "[Soon|After a while|At noon] {a_pal} came along, looking very [sad|worried|tired].",
    "\"I lost my {t},\" said {pal}. \"I have looked [for it all day|for it everywhere].\"",
    "\"[Is this it?|Is this your {t}?|Look what I found!]\" said {H} and held it up.",
    "{Pal} [was so happy|could not believe it|smiled from ear to ear] and said, \"[Thank you|You "
    "are very kind|You are a true friend], {H}!\"",
    "From that day on, {H} and {pal} [were best friends|met {at_p} every day|played together "
    "every day].",
)
_BROKEN = (
    "{H} [had {a_t} and liked to play with it {at_p}|liked to play with {a_t} {at_p}].",
    "One day the {t} [fell down|hit a stone|slipped and fell] and broke in two.",
    "\"Oh no!\" [cried|said] {H}. \"[My {t} is broken!|Now it is broken!|What can I do now?]\"",
    "{H} [tried to fix it|tried again and again|worked for an hour], but [it was too hard|the "
    "parts did not hold|nothing helped].",
    "{Pal} [heard the noise|saw it|was near] and came to [look|help|see].",
    "\"[I can help you|Let me help|I know what to do],\" said {pal}. \"We need [some glue|some "
    "string|a little time].\"",
    "They worked [side by side|slowly|all afternoon] and [did not give up|put the parts "
    "together|were very careful].",
    "[At last|In the end|Before dinner] the {t} was [whole again|as good as new|better than "
    "before].",
    "{H} smiled and said, \"[Thank you|You are a good friend|I could not do it without you], "
    "{pal_call}!\"",
)
_SHARE = (
    "{H} got {a_t} [as a birthday present|from a kind uncle|from an old aunt] and was very "
    "[proud|happy].",
    "{He} took the {t} to {p} and [played with it|showed it to everyone|would not put it down].",
    "{a_pal} was there, too, and had [nothing to play with|never seen such a thing|been alone "
    "all day].",
    "\"[May I try it|Can I play too|May I hold the {t}]?\" asked {pal}.",
    "\"No, it is mine,\" said {H} and [turned away|walked off|held it tight].",
    "But [soon|after a while] {H} felt [bad|lonely|sorry], because it was [no fun|not nice] to "
    "play alone.",
    "So {he} went back and said, \"[I am sorry|Let us share|You can have a turn]. [Let us play "
    "together|We can both play with the {t}].\"",
    "They played until the sun went down, and {pal} [laughed and sang|was very happy|had a "
    "wonderful time].",
    "{H} learned that [it is good to share|sharing makes things better|a friend is worth more "
    "than {a_t}].",
)
_BRAVE = (
    "{H} wanted to [go to|visit|see] {p}, but was afraid [of the dark|of the noise|to go alone].",
    "\"Take this {t},\" said [an old man|an old woman|a neighbour]. \"It will [help you|make you "
    "brave|bring you luck].\"",
    "So {he} took the {t} and [went out of the door|set off|started to walk].",
    "[On the way|After a mile|Near a big tree] there was a [strange|small|loud] sound.",
    "{H} held the {t} tight and [did not run away|went on|looked around].",
    "It was only {a_pal} who was [lost|stuck in the mud|afraid, too].",
    "\"[Do not be afraid|I will help you|You are safe now],\" said {H}. \"[Come with me|We can go "
    "together].\"",
    "Together they walked to {p}, and it was [not scary at all|beautiful there|full of light].",
    "\"You are so brave, {H},\" said {pal}, and {H} [smiled|was very proud|knew it was true].",
)
_STORM = (
    "One [day|evening|morning] {H} was {at_p} with {a_pal} when [dark clouds came|it began to "
    "rain|a big storm came].",
    "\"[Look at the sky|We must go home|Hurry],\" said {H}. \"It is going to [rain hard|get "
    "cold].\"",
    "But the wind was so strong that it [took|blew away] the {t} that {H} [had|carried|held].",
    "\"My {t}!\" cried {H} and ran after it.",
    "{Pal} [ran faster|was very quick|did not wait] and caught the {t} just in time.",
    "They hid [under a big tree|in a little house|under a bridge] and waited [for the sun|until "
    "the storm was over].",
    "{H} told {pal} [a funny story|a secret|a joke], and soon they were not afraid any more.",
    "[At last|Then|After an hour] the rain stopped, and [a rainbow|the sun|a blue sky] came out.",
    "They walked home with the {t}, wet but [happy|laughing|singing].",
)
_MAKE = (
    "{H} wanted to make {a_t} for {a_pal}, because it was [a special day|{pal_poss} birthday].",
    "{He} went to {p} to look for [wood and paper|glue and string|the right parts].",
    "{H} worked [all day|all morning|for many hours] and did not stop to [rest|play|eat].",
    "The first {t} was too [small|big|soft], and the second one fell apart.",
    "\"I will try once more,\" said {H} and [took a deep breath|started again|counted to three].",
    "The third {t} was [perfect|just right|the best of all].",
    "[In the evening|At last|Then] {H} gave it to {pal} and said, \"[This is for you|I made this "
    "for you|Look what I made].\"",
    "\"[What a wonderful {t}|I love it|It is beautiful]!\" said {pal}. \"[Thank you|You are so "
    "kind], {H}.\"",
    "{H} was [tired but happy|glad and proud|very proud].",
)
_TRADE = (
    "{H} was [very hungry|on a long walk|looking for something new] {at_p} and had only {a_t}.",
    "Then {a_pal} came along with [a basket of apples|a big cake|warm bread].",
    "\"[Hello|Good day|Good morning],\" said {H}. \"[That smells good|That looks nice]. I have "
    "nothing but this {t}.\"",
    "{Pal} looked at the {t} for a long time and [smiled|nodded|thought].",
    "\"[I always wanted {a_t}|I need {a_t} like this],\" said {pal}. \"[Shall we trade|Let us "
    "trade].\"",
    "{H} thought about it and then said, \"[Yes|I have a better idea]. [You may use it|We can "
    "share it], and we can eat together.\"",
    "So they sat down in the [grass|shade|sun] and [ate and talked|shared everything they had].",
    "They played with the {t} until [it was dark|the stars came out|the evening came].",
    "{H} went home with a full heart and [a new friend|a big smile].",
)
PLOTS = (_LOST, _FOUND, _BROKEN, _SHARE, _BRAVE, _STORM, _MAKE, _TRADE)

ENDINGS = (
    "[That night|In the evening], {H} [slept well|fell asleep with a smile|dreamed of {p}].",
    "And {H} [never forgot that day|was happy ever after|always remembered it].",
    "It was the best day [of the year|{H} ever had].",
    "{H} [went home|walked home] and told [everyone at home|the whole family] [about it|"
    "everything].",
)
