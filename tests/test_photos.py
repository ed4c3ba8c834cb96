"""docs/figures/photos.py: the photos of the screenshots and of the site's page."""


def test_every_photo_has_a_licence(script, tmp_path):
    photos = script("docs/figures/photos.py")
    assert photos.make_photos(tmp_path / "photos") == 4
    lines = (photos.PHOTOS / "LICENCES.txt").read_text().splitlines()
    licences = dict(line.split(maxsplit=1) for line in lines)
    assert licences.keys() == {photo.name for photo in (tmp_path / "photos").iterdir()}
    assert all("CC" in licence for licence in licences.values())
