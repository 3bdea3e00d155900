"""Chat prompts composed from templates and topics: the same list in every run, from no file.

    python -m recipes.smollm2_prompts FOLDER

writes them as `FOLDER/prompts.jsonl` and `FOLDER/heldout.jsonl`, which `--data` reads.
"""

from __future__ import annotations

import json
import random
import sys
from itertools import product
from pathlib import Path

TEMPLATES = (
    "What is {}?", "Explain {} to a ten-year-old.", "Explain {} in two sentences.", "Tell me about {}.",
    "Give me three facts about {}.", "Why does {} matter?", "How has {} changed over the last century?",
    "Write a short paragraph about {}.", "Write a short poem about {}.", "Write a haiku about {}.",
    "Write a very short story in which {} plays a part.", "List five words that people connect with {}.",
    "What are common misunderstandings about {}?", "What should a beginner know about {}?",
    "What are the advantages and disadvantages of {}?", "Write a title and a first sentence for an article about {}.",
    "Write three quiz questions about {}, with answers.", "Compare {} with something similar.",
    "How would you teach {} to a class?", "Describe {} without using its name.",
    "Who is interested in {}, and why?", "Summarize the history of {}.", "What questions about {} are still open?",
    "Write a dialogue between two friends about {}.", "Make a plan for learning about {} in one week.",
    "What tools or materials belong to {}?", "What could go wrong with {}?", "Write a slogan for a museum about {}.",
    "What would the world be like without {}?", "Give an analogy for {}.",
    "What is the most surprising thing about {}?", "Write an encouraging message to someone who struggles with {}.",
)  # fmt: skip
TOPICS = (
    "photosynthesis", "the water cycle", "gravity", "electricity", "magnetism", "the Moon", "black holes",
    "volcanoes", "earthquakes", "rainbows", "thunderstorms", "glaciers", "coral reefs", "rain forests", "deserts",
    "rivers", "the ocean tides", "honey bees", "whales", "penguins", "dogs", "cats", "horses", "dinosaurs",
    "migrating birds", "mushrooms", "trees", "vaccines", "the human heart", "sleep", "memory", "dreams",
    "exercise", "healthy food", "bread baking", "cheese", "chocolate", "coffee", "tea", "rice", "pizza", "soup",
    "gardening", "compost", "recycling", "solar energy", "wind power", "batteries", "bicycles", "trains",
    "airplanes", "ships", "bridges", "lighthouses", "castles", "cathedrals", "skyscrapers", "paper", "printing",
    "clocks", "maps", "the compass", "telescopes", "microscopes", "computers", "programming", "the internet",
    "encryption", "robots", "artificial intelligence", "databases", "spreadsheets", "prime numbers", "fractions",
    "geometry", "probability", "statistics", "chess", "football", "swimming", "mountain climbing", "painting",
    "photography", "music theory", "the piano", "the violin", "jazz", "opera", "theatre", "poetry", "novels",
    "fairy tales", "dictionaries", "learning a language", "handwriting", "public speaking", "friendship",
    "patience", "money", "saving", "taxes", "insurance", "democracy", "elections", "the Roman Empire",
    "ancient Egypt", "the Silk Road", "the Renaissance", "the industrial revolution", "space travel",
)  # fmt: skip
LETTERS = (
    "Write a short email to {} about {}.", "What is a polite way to talk with {} about {}?",
    "Write a text message of two sentences to {} about {}.",
)  # fmt: skip
PEOPLE = (
    "my boss", "a colleague", "my neighbour", "my teacher", "a customer", "my landlord", "an old friend",
    "my sister", "a hotel", "the city library",
)  # fmt: skip
MATTERS = (
    "a meeting that I cannot attend", "a late delivery", "a noisy evening", "a birthday party", "a lost key",
    "a question about opening hours", "a broken heater", "an idea for a project", "a thank-you for good help",
    "a change of plans", "a borrowed book", "a day off next week",
)  # fmt: skip
_EVERY = 10  # one topic, and one matter, in so many is kept for the held-out prompts


def chat_prompts() -> tuple[list[str], list[str]]:
    """(training prompts, held-out prompts), each shuffled by a fixed seed so that any prefix is a fair sample.

    No topic and no matter of the held-out prompts occurs in a training prompt.
    """
    train, heldout = [], []
    for number, topic in enumerate(TOPICS):
        side = heldout if number % _EVERY == _EVERY - 1 else train
        side += [template.format(topic) for template in TEMPLATES]
    for number, matter in enumerate(MATTERS):
        side = heldout if number % _EVERY == _EVERY - 1 else train
        side += [letter.format(person, matter) for letter, person in product(LETTERS, PEOPLE)]
    for side in (train, heldout):
        random.Random(0).shuffle(side)
    return train, heldout


def write(folder: Path) -> list[Path]:
    """`prompts.jsonl` and `heldout.jsonl` in `folder`, one record a line."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, prompts in zip(("prompts", "heldout"), chat_prompts(), strict=True):
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return paths


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
