"""Classifies a photo by an ONNX file of ``gaupipe export-student``, with onnxruntime, Pillow and
numpy alone.

    python examples/predict_onnx.py student.onnx photo.jpg
"""

import io
import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageCms, ImageOps


def read_rgb(path):
    """A photo upright, in sRGB and on white, as gaupipe reads it."""
    image = Image.open(path)
    if image.mode[0] in "IF" or ";16" in str(image.tile):
        sys.exit(f"{path} has more than 8 bits a value: scale it to 8 bits first")
    image = ImageOps.exif_transpose(image)
    alpha = None
    if image.has_transparency_data:
        image = image.convert("LA" if image.mode[0] in "1L" else "RGBA")
        alpha = image.getchannel("A")
        image = image.convert(image.mode.removesuffix("A"))
    if image.mode not in ("L", "CMYK"):
        image = image.convert("RGB")
    profile = image.info.get("icc_profile")
    if profile:
        try:
            srgb = ImageCms.createProfile("sRGB")
            image = ImageCms.profileToProfile(image, io.BytesIO(profile), srgb, outputMode="RGB")
        except ImageCms.PyCMSError:  # it is damaged or of another mode
            pass
    image = image.convert("RGB")
    if alpha is not None:
        image = Image.composite(image, Image.new("RGB", image.size, "white"), alpha)
    return image


def middle(image, width, height):
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    return image.crop((left, top, left + width, top + height))


session = onnxruntime.InferenceSession(sys.argv[1])
about = {}
for name, value in session.get_modelmeta().custom_metadata_map.items():
    about[name] = value if name == "preparation" else json.loads(value)
channels, _, size = about["input_size"]

image = read_rgb(sys.argv[2])
longest = 16 * min(image.size)  # resized whole, a line of pixels would fill the memory
image = middle(image, min(image.width, longest), min(image.height, longest))
if channels == 1:
    image = image.convert("L")
short = int(size / about["crop_pct"])  # pixels of the shorter side; the longer one is rounded down
width, height = (short * side // min(image.size) for side in image.size)
image = image.resize((width, height), Image.Resampling[about["interpolation"].upper()])
image = middle(image, size, size)

pixels = np.asarray(image, np.float32).reshape(size, size, channels) / 255
pixels = (pixels - np.float32(about["mean"])) / np.float32(about["std"])
(logits,) = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})
probabilities = np.exp(logits[0] - logits[0].max())
probabilities /= probabilities.sum()
print(about["label_names"][probabilities.argmax()], probabilities.max())
