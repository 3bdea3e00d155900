"""How data and its prompts are named on the command line; read by help texts, so nothing is imported here."""

SCENES = "SPLIT[:COUNT][:offset=N][:seed=N][:variant=N]"
DATA = (
    f"scenes:{SCENES}, scenes-captions:…, scenes-questions:…, films:…, films-questions:…, pairs-questions:…, coco:JSON,IMAGES[,SPLIT], images:FOLDER, FILE.jsonl, a "
    "folder written by generate-data, or NAME:… of a published data set (vqav2, visdial, hf …: docs/how-to/data.md)"
)
PROMPT = (
    "Prompt of records that have none; one that holds {question} goes around a record's own: '{question} Answer in one "
    "word.'"
)
INSIDE = (
    "Refuse pictures and videos that data name outside of this folder, links followed. Without it data may name any file that "
    "you can read."
)
