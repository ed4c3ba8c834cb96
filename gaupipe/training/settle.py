"""Settings with what is decided when a run begins, and then belongs to it."""

from __future__ import annotations

from gaupipe.settings import Settings
from gaupipe.system import distributed
from gaupipe.system.device import choose_precision, prepare_device
from gaupipe.vit.build import width_of
from gaupipe.vit.fine_tuning import fine_tunes, with_images_of_weights


def settle(settings: Settings, before: Settings | None = None) -> Settings:
    """The settings with what they leave open: how trained weights expect images, the precision, and
    the number of buckets; where there is a run ``before``, its own."""
    if fine_tunes(settings.model.name):
        settings = with_images_of_weights(settings)
    if settings.precision == "auto":
        precision: str
        if before:
            precision = before.precision
        else:
            device = prepare_device(settings.device, settings.threads)
            precision = choose_precision("auto", device, width_of(settings.model))
        settings = settings.model_copy(update={"precision": precision})
    buckets = before.data.buckets if before else distributed.world_size()
    return settings.with_buckets(buckets)
