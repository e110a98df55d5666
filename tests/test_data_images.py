"""examples/data: labelled images from .npz files and folders, and the digits drawn here."""

import numpy as np
import pytest
from lowmembp_examples.data.batches import EvaluationBatches, TrainingBatches
from lowmembp_examples.data.digits import draw_digits
from lowmembp_examples.data.files import DataError
from lowmembp_examples.data.image_files import read_folder, read_npz
from lowmembp_examples.data.images import ImageDataset, LabelledImages
from lowmembp_examples.data.tasks import DataConfig, load_task
from PIL import Image

HALF = ((0.5,) * 3, (0.5,) * 3)


def random_images(*shape, seed=0):
    return np.random.default_rng(seed).integers(256, size=shape, dtype=np.uint8)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


def folder(path, **classes):
    """`name=[image, ...]`, saved as PNG."""
    for name, images in classes.items():
        (path / name).mkdir(parents=True)
        for index, image in enumerate(images):
            Image.fromarray(image).save(path / name / f"{index}.png")
    return path


def load(**fields):
    return load_task(DataConfig("image-classification", **fields))


def test_normalization():
    images = random_images(3, 8, 8, 3)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = LabelledImages(images, np.array([0, 1, 0], np.int32), ("a", "b"), "x")
    batch = ImageDataset(data, 8, mean, std).batch(np.array([2, 1]))
    assert batch.images.dtype == np.float32 and batch.labels.tolist() == [0, 1]
    expected = (images[[2, 1]] / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(batch.images, expected, atol=1e-6)


def test_other_sizes_are_resized():
    ramp = np.broadcast_to(np.arange(0, 240, 10, dtype=np.uint8)[:, None, None], (24, 12, 3))
    data = LabelledImages(ramp[None], np.zeros(1, np.int32), ("a",), "x")
    (small,) = ImageDataset(data, 6, *HALF).batch(np.array([0])).images
    assert small.shape == (6, 6, 3)
    # A row is the mean of 4 rows and, by the filter, of its neighbours: the ramp inside.
    rows = (small[:, 0, 0] + 1) * 127.5
    np.testing.assert_allclose(rows[1:-1], [55, 95, 135, 175], atol=1)
    (large,) = ImageDataset(data, 48, *HALF).batch(np.array([0])).images
    assert large.shape == (48, 48, 3) and (np.diff(large[:, 0, 0]) >= 0).all()


def test_half_of_the_training_images_are_mirrored():
    data = LabelledImages(random_images(64, 4, 4, 3), np.zeros(64, np.int32), ("a",), "x")
    plain, flip = (ImageDataset(data, 4, *HALF, flip=flip) for flip in (False, True))
    expected, batches = TrainingBatches(plain, 64, seed=5), TrainingBatches(flip, 64, seed=5)
    mirrored = []
    for step in range(4):
        original, images = expected.at(step).images, batches.at(step).images
        same = (images == original).all((1, 2, 3))
        np.testing.assert_array_equal(images[~same], original[~same, :, ::-1])
        mirrored.append((~same).tolist())
        np.testing.assert_array_equal(batches.at(step).images, images)
        parts = [TrainingBatches(flip, 64, 5, index, 2).at(step).images for index in range(2)]
        np.testing.assert_array_equal(np.concatenate(parts), images)
    assert 0.35 < np.mean(mirrored) < 0.65 and mirrored[0] != mirrored[1]
    for one, other in zip(EvaluationBatches(flip, 16), EvaluationBatches(plain, 16), strict=True):
        np.testing.assert_array_equal(one.images, other.images)


@pytest.mark.parametrize(
    "names",
    [
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("x_train", "y_train", "x_test", "y_test"),
        ("images", "labels", "val_images", "val_labels"),
    ],
)
def test_npz(tmp_path, names):
    images, gray = random_images(6, 5, 4, 3), random_images(3, 5, 4)
    values = (images, np.arange(6).reshape(6, 1) % 3, gray, np.array([2, 1, 0], np.uint8))
    train, dev = read_npz(save(tmp_path / "a.npz", **dict(zip(names, values, strict=True))))
    np.testing.assert_array_equal(train.images, images)
    np.testing.assert_array_equal(dev.images, np.stack([gray] * 3, -1))
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2] and dev.labels.tolist() == [2, 1, 0]
    assert train.classes == dev.classes == ("0", "1", "2")
    assert train.labels.dtype == dev.labels.dtype == np.int32


def test_val_comes_before_test_and_classes_have_names(tmp_path):
    arrays = {"train_images": random_images(2, 4, 4, 3), "train_labels": np.array([0, 1])}
    for index, name in enumerate(("test", "val")):
        arrays[f"{name}_images"] = random_images(1, 4, 4, 1)
        arrays[f"{name}_labels"] = np.array([index])
    train, dev = read_npz(save(tmp_path / "a.npz", **arrays, classes=np.array(["cat", "dog"])))
    assert dev.labels.tolist() == [1] and train.classes == dev.classes == ("cat", "dog")


IMAGES, LABELS = random_images(4, 8, 8, 3), np.array([0, 1, 2, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixels": IMAGES}, "expected the keys train_images and train_labels .* found pixels"),
        ({"images": IMAGES / 255, "labels": LABELS}, r"images must be uint8 .* float64 \[4, 8, 8"),
        ({"images": IMAGES[0, 0], "labels": LABELS}, r"images must be uint8 .*found uint8 \[8, 3"),
        ({"images": IMAGES[..., :2], "labels": LABELS}, r"images must be uint8 .*\[4, 8, 8, 2\]"),
        ({"images": IMAGES[:0], "labels": LABELS}, "images has no pixels"),
        ({"images": IMAGES, "labels": LABELS / 2}, r"labels must be integers .* float64 \[4\]"),
        ({"images": IMAGES, "labels": LABELS[:3]}, "images has 4 images, labels 3 labels"),
        ({"images": IMAGES, "labels": LABELS - 1}, r"labels\[0\] must be 0 to .* found -1"),
        ({"images": IMAGES, "labels": LABELS * 10**9}, r"labels\[1\] must be 0 to 2, .* found"),
        (
            {"images": IMAGES, "labels": LABELS, "classes": np.array(["a", "b"])},
            r"labels\[2\] must be 0 to 1, .* found 2",
        ),
        ({"images": np.array([None]), "labels": LABELS}, "not a .npz of plain arrays: .* Object"),
    ],
)
def test_errors_of_an_npz_name_the_array(tmp_path, arrays, message):
    with pytest.raises(DataError, match=rf"a\.npz: {message}"):
        read_npz(save(tmp_path / "a.npz", **arrays))


def test_broken_archives(tmp_path):
    path = save(tmp_path / "a.npz", images=IMAGES, labels=LABELS)
    content = path.read_bytes()
    header = content.replace(b"(4, 8, 8, 3)", b"(4, 1" + b"0" * 20 + b",)")  # zettabytes
    damaged = content.replace(IMAGES.tobytes()[:9], b"x" * 9)
    for broken in (b"", b"text", content[:200], content[:-9], header, damaged):
        path.write_bytes(broken)
        with pytest.raises(DataError, match=r"a\.npz: not a \.npz of plain arrays: "):
            load(train=path)
    np.save(tmp_path / "b.npy", IMAGES)
    (tmp_path / "b.npy").rename(path)
    with pytest.raises(DataError, match=r"a\.npz: not a \.npz"):
        load(train=path)


def test_folder(tmp_path):
    cats, dogs = random_images(3, 8, 8, 3), random_images(2, 8, 8, 3, seed=1)
    folder(tmp_path / "train", cat=cats, dog=dogs)
    folder(tmp_path / "val", dog=random_images(1, 6, 9))  # gray, of another size
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not looked at")
    (tmp_path / "train" / "cat" / "._0.png").write_text("of a Macintosh")
    task = load(train=tmp_path, image_size=8)
    assert task.classes == ("cat", "dog") and (len(task.train), len(task.dev)) == (5, 1)
    batch = task.train.batch(np.arange(5))
    assert batch.labels.tolist() == [0, 0, 0, 1, 1]
    np.testing.assert_allclose((batch.images + 1) * 127.5, np.concatenate([cats, dogs]), atol=1e-3)
    (dev,) = EvaluationBatches(task.dev, 2)
    assert dev.labels.tolist() == [1, 1] and dev.mask.tolist() == [True, False]
    assert dev.images.shape == (2, 8, 8, 3) and (dev.images[..., 0] == dev.images[..., 2]).all()


def test_all_kinds_of_pixels_become_rgb(tmp_path):
    red = Image.new("RGB", (4, 4), (255, 0, 0))
    upright = red.copy()
    upright.paste((0, 0, 255), (0, 0, 4, 2))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    directory = tmp_path / "a"
    directory.mkdir()
    red.convert("P").save(directory / "0.png", transparency=b"\0\1")
    red.convert("RGBA").save(directory / "1.png")
    red.convert("CMYK").save(directory / "2.JPG", quality=100)
    upright.rotate(180).save(directory / "3.png", exif=exif)
    ramp = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)
    Image.fromarray(ramp).save(directory / "4.png")
    (tmp_path / "b").mkdir()
    red.save(tmp_path / "b" / "0.jpeg")
    data, _ = read_folder(tmp_path)
    images = ImageDataset(data, 4, *HALF).batch(np.arange(6)).images
    pure = [1, -1, -1]
    for index in (0, 1, 2, 5):
        np.testing.assert_allclose(images[index], np.broadcast_to(pure, (4, 4, 3)), atol=0.1)
    np.testing.assert_allclose(images[3], np.asarray(upright) / 127.5 - 1, atol=1e-5)
    np.testing.assert_allclose(images[4, :, :, 0], ramp / 32767.5 - 1, atol=0.01)


def test_errors_of_a_folder_name_the_file(tmp_path):
    root = folder(tmp_path / "train", cat=random_images(1, 8, 8, 3), dog=random_images(1, 8, 8, 3))
    (root / "bird").mkdir()
    with pytest.raises(DataError, match=r"bird: expected images of this class, \.png, \.jpg"):
        load(train=root)
    bird = root / "bird" / "0.png"
    bird.write_text("no image")
    with pytest.raises(DataError, match=r"bird/0\.png: not a readable image: cannot identify"):
        load(train=root)
    Image.fromarray(random_images(64, 64, 3)).save(bird)
    bird.write_bytes(bird.read_bytes()[:2000])
    task = load(train=root)
    with pytest.raises(DataError, match=r"bird/0\.png: not a readable image"):
        list(EvaluationBatches(task.train, 2)) + list(EvaluationBatches(task.dev, 2))
    dev = folder(tmp_path / "dev", cat=random_images(1, 8, 8, 3), fish=random_images(2, 8, 8, 3))
    with pytest.raises(DataError, match=r"fish/0\.png: the class 'fish' does not occur in .*train"):
        load(train=root, dev=dev)
    with pytest.raises(DataError, match="at least 2 classes, found 1"):
        load(train=folder(tmp_path / "one", cat=random_images(3, 8, 8, 3)))
    with pytest.raises(DataError, match="cat: expected a directory for each class"):
        load(train=dev / "cat")
    with pytest.raises(DataError, match=r"none: No such file"):
        load(train=tmp_path / "none")
    with pytest.raises(DataError, match=r"0\.png: expected a \.npz file, a directory"):
        load(train=dev / "cat" / "0.png")


def test_evaluation_from_another_file(tmp_path):
    train = save(tmp_path / "train.npz", images=IMAGES, labels=LABELS)
    dev = save(tmp_path / "dev.npz", images=IMAGES, labels=[1, 1, 0, 0])
    task = load(train=train, dev=dev, image_size=8)
    assert task.dev.batch(np.arange(4)).labels.tolist() == [1, 1, 0, 0] and len(task.classes) == 3
    with pytest.raises(DataError, match=r"train\.npz, image 2: the class '2' does not occur in"):
        load(train=dev, dev=train)
    held_out = load(train=train, dev_fraction=0.25)
    assert (len(held_out.train), len(held_out.dev)) == (3, 1)


def test_digits_can_be_told_apart():
    train, dev = draw_digits(800, seed=0), draw_digits(100, seed=1)
    np.testing.assert_equal(draw_digits(800, seed=0), train)
    assert np.bincount(train.labels).tolist() == [80] * 10
    assert not {image.tobytes() for image in train.images} & {i.tobytes() for i in dev.images}

    def features(images):
        """The ink on its own, whatever the greys: distance from the border's mean."""
        border = np.concatenate([images[:, :2], images[:, -2:]], 1).mean((1, 2))
        ink = np.abs(images - border[:, None, None]).mean(-1).reshape(len(images), -1)
        return ink / np.linalg.norm(ink, axis=1, keepdims=True)

    nearest = (features(dev.images) @ features(train.images).T).argmax(1)
    assert (train.labels[nearest] == dev.labels).mean() > 0.8  # chance is 0.1


def test_the_default_needs_no_file():
    task = load()
    assert task.classes == tuple("0123456789") and (len(task.train), len(task.dev)) == (5000, 1000)
    assert TrainingBatches(task.train, 8, seed=0).at(2).images.shape == (8, 32, 32, 3)
