"""One example for the end of every command's help."""

EXAMPLES = {
    "run": "vlmexport run bundle --image scene.png --draft imitation",
    "serve": "vlmexport serve bundle --port 8000",
    "caption": "vlmexport caption bundle photos -o captions.parquet",
    "bench": "vlmexport bench bundle --image scene.png --repeats 10",
    "profile": "vlmexport profile bundle --html times.html",
    "inspect": "vlmexport inspect bundle",
    "models": "vlmexport models",
    "build": "vlmexport build --model tiny-blip2-flant5 -o bundle",
    "verify": "vlmexport verify bundle --model tiny-blip2-flant5",
    "fit": "vlmexport fit bundle --target orin-nano",
    "compile": "vlmexport compile bundle --backend tensorrt-rtx --target sm86",
    "export-draft": "vlmexport export-draft runs/eagle3/best -o eagle3",
    "train": "vlmexport train --model tiny-blip2-flant5 --data answers --draft medusa -o run",
    "search": "vlmexport search --model tiny-blip2-flant5 --data answers -o skip",
    "generate-data": "vlmexport generate-data --model tiny-blip2-flant5 --data images:photos -o answers",
    "eval": "vlmexport eval --model tiny-blip2-flant5 --data scenes:heldout:64 --draft run/best",
    "quantize": "vlmexport quantize --model tiny-blip2-flant5 --data answers -o int4",
    "tune": "vlmexport tune bundle --data requests.jsonl",
}
