"""Classifies a photo by an ONNX file of ``gaupipe export-student``, with onnxruntime, Pillow and
numpy alone.

    python examples/predict_onnx.py student.onnx photo.jpg
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = {}
for name, value in session.get_modelmeta().custom_metadata_map.items():
    about[name] = value if name == "preparation" else json.loads(value)
channels, _, size = about["input_size"]

image = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert("RGB")
if channels == 1:
    image = image.convert("L")
short = int(size / about["crop_pct"])  # pixels of the shorter side; the longer one is rounded down
width, height = (short * side // min(image.size) for side in image.size)
image = image.resize((width, height), Image.Resampling[about["interpolation"].upper()])
left, top = round((width - size) / 2), round((height - size) / 2)
image = image.crop((left, top, left + size, top + size))

pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 255
pixels = (pixels - np.float32(about["mean"])) / np.float32(about["std"])
(logits,) = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})
probabilities = np.exp(logits[0] - logits[0].max())
probabilities /= probabilities.sum()
print(about["label_names"][probabilities.argmax()], probabilities.max())
