"""What the model is asked: plain questions, arithmetic and things to write, in turns. 96 prompts, always the same."""

import random


QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do plants make food?",
    "What is a prime number?",
    "Who wrote Romeo and Juliet?",
    "How many days does a year have, and why?",
    "What is the largest ocean on Earth?",
    "Why do we have seasons?",
    "How does a bicycle stay upright?",
    "What is the difference between weather and climate?",
    "Name five animals that can fly.",
    "What does a baker do all day?",
    "How do you boil an egg?",
    "Which is heavier, a kilogram of iron or a kilogram of feathers?",
    "What is the speed of light?",
    "How do vaccines work?",
    "What is photosynthesis, in two sentences?",
    "Why do cats purr?",
    "What are the three states of matter?",
    "How does a magnet work?",
    "What should I pack for a week at the sea?",
    "Translate 'good morning, my friend' into Spanish and into French.",
    "What is the opposite of generous?",
    "Give three reasons to read books.",
    "How do I learn to play the guitar?",
    "What is a good breakfast for a runner?",
    "Which planets of the solar system have rings?",
    "Explain what an algorithm is to a child.",
    "What is the past tense of 'to swim'?",
    "What happens when water freezes?",
    "Write a Python function that reverses a string.",
    "How can a city become greener?",
]

WRITING = [
    "Tell me a short story about a dog that is lost.",
    "Tell me a short story about a clockmaker.",
    "Write a poem about rain.",
    "Write a poem about an old bridge, in four lines.",
    "Describe a market in the early morning.",
    "Write a letter to a friend who has moved away.",
    "Tell me a story that begins with: The door was open.",
    "Write a dialogue between the sun and the moon.",
    "Describe the sea to someone who has never seen it.",
    "Write an advertisement for a very slow car.",
    "Tell a story about two bees that get lost in a storm.",
    "Write a diary entry of a lighthouse keeper.",
    "Describe a meal that you remember well.",
    "Write a fairy tale about a king who could not sleep.",
    "Tell me a story about a train that never stops.",
    "Write a short speech for the opening of a library.",
    "Describe a winter evening in a small town.",
    "Write a recipe for happiness.",
    "Tell me about the life of a river.",
    "Write a story in which a chess player loses on purpose.",
    "Write a short news report about a snowstorm.",
    "Describe your favourite tree.",
    "Tell a joke about a mathematician.",
    "Write the beginning of a detective story.",
    "Write a lullaby for a robot.",
    "Describe a crowded train station.",
    "Tell me a story about a lost key.",
    "Write an apology from a cat to a mouse.",
    "Write a postcard from the desert.",
    "Describe how music sounds to you.",
    "Tell a story about a child who counts stars.",
    "Write a toast for a wedding.",
]


def arithmetic(n: int) -> list[str]:
    """Questions about numbers, drawn once and for all."""
    dice = random.Random(0)
    things = ["apples", "books", "coins", "stamps", "marbles"]
    found = []
    for i in range(n):
        a, b, c = dice.randrange(2, 60), dice.randrange(2, 40), dice.randrange(2, 12)
        found.append(
            [
                f"What is {a} + {b}?",
                f"What is {a} times {c}? Think step by step.",
                f"I have {a + b} {dice.choice(things)} and give away {b}. How many are left?",
                f"Which is larger, {a}/{b} or {b}/{a}? Explain.",
            ][i % 4]
        )
    return found


PROMPTS = [prompt for three in zip(QUESTIONS, arithmetic(32), WRITING, strict=True) for prompt in three]
