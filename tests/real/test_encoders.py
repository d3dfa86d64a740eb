"""Published sentence encoders: vectors against transformers', and texts that the models are known to find alike."""

import numpy as np
import pytest

from tests.support.published import minilm_folder, mpnet_folder
from verax import Encoder
from verax.compare.outputs import compare_vectors

SENTENCES = [
    "A man is playing a guitar.",
    "Someone plays an instrument on the stage of a small theatre.",
    "The stock market fell by three percent on Tuesday.",
    "Shares lost ground this week.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "How do I reset my password?",
    "I forgot my login details, what now?",
    "The cat sat on the mat.",
    "THE CAT SAT ON THE MAT!!!",
    "Le chat est assis sur le tapis.",
    "Die Katze sitzt auf der Matte, während es draußen regnet.",
    "猫はマットの上に座っています。",
    "Кошка сидит на коврике.",
    "قطة تجلس على السجادة",
    "🦊🦊🦊 foxes 👩‍👩‍👧 and families",
    "",
    " ",
    "\n\t\n",
    "a",
    "?",
    "1234567890 3.14159 -1e-9 0x7f",
    "naïve café résumé e\u0301 ﬁ Ⅷ",
    "def f(x: int) -> int:\n    return x ** 2  # square",
    "<b>bold</b> &amp; <script>alert('x')</script>",
    "[CLS] [SEP] [MASK] [PAD] are tokens",
    "https://example.org/a/very/long/path?with=query&and=more#fragment",
    "supercalifragilisticexpialidocious pneumonoultramicroscopicsilicovolcanoconiosis",
    "zero\u200bwidth\u00a0space\ufeff and control \x00\x01\x7f characters",
    "word " * 300,
    "Rain is expected in the north. " * 40,
    "He said: “Well, that’s that—isn’t it?”",
    "SELECT name, COUNT(*) FROM users WHERE age >= 18 GROUP BY name HAVING COUNT(*) > 1;",
    "E = mc², ∑ᵢ xᵢ ≤ ∫₀¹ f(t) dt",
    "Mia bought three apples for $5 at the market.",
    "Mia spent five dollars on three apples.",
    "Tom's phone will not start since the update.",
]

ALIKE = [
    ("A man is playing a guitar.", "Someone is strumming a guitar.", "A man is eating a sandwich."),
    ("How do I reset my password?", "I forgot my login details, what now?", "How do I bake bread?"),
    ("The stock market fell on Tuesday.", "Shares lost ground this week.", "The cat sat on the mat."),
    ("Mia bought three apples for $5.", "Mia spent five dollars on 3 apples.", "Rain is expected in the north."),
    ("A plane is taking off.", "An air plane is taking off.", "A dog is chewing on a stick."),
]
"""A sentence, one that means nearly the same, and one that does not."""


@pytest.fixture(scope="module")
def folder():
    return minilm_folder()


def published_vectors(folder, max_length):
    """Vectors as the models' cards compute them with transformers: the masked mean, normalised."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    vectors = []
    for sentence in SENTENCES:
        inputs = tokenizer(sentence, truncation=True, max_length=max_length, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy())
    return np.stack(vectors)


@pytest.fixture(scope="module")
def expected(folder):
    return published_vectors(folder, 256)


def test_float32_vectors_match_transformers(folder, expected):
    encoder = Encoder(folder)
    assert (encoder.dimension, encoder.max_length) == (384, 256)
    ours = encoder.encode(SENTENCES, batch_size=8, show_progress=False)
    assert encoder.truncated == 2
    assert np.abs(ours - expected).max() < 1e-6  # measured: 4e-7, of numbers up to 0.2


def test_vectors_of_mpnet_match_transformers():
    folder = mpnet_folder()
    encoder = Encoder(folder)
    assert (encoder.dimension, encoder.max_length) == (768, 384)
    ours = encoder.encode(SENTENCES, batch_size=8, show_progress=False)
    expected = published_vectors(folder, 384)
    assert np.abs(ours - expected).max() < 3e-6  # measured: 2e-6; from float64, 1.5e-6 and transformers 1.3e-6
    rounded = Encoder(folder, dtype="bfloat16").encode(SENTENCES, show_progress=False)
    cosines = (rounded * expected).sum(axis=1)
    assert cosines.min() > 0.95  # "word " 300 times: 0.962, and transformers' bfloat16 0.950
    assert np.median(cosines) > 0.999


def test_bfloat16_vectors_point_the_same_way(folder, expected):
    ours = Encoder(folder, dtype="bfloat16").encode(SENTENCES, show_progress=False)
    assert (ours * expected).sum(axis=1).min() > 0.9995


def test_sentences_that_mean_the_same_are_nearer(folder):
    encoder = Encoder(folder)
    for sentence, same, other in ALIKE:
        one, near, far = encoder.encode([sentence, same, other], show_progress=False)
        assert one @ near > 0.5 > 0.3 > one @ far


def test_vectors_of_integers_rank_texts_as_float32_does(folder):
    texts = [*SENTENCES, *(text for texts in ALIKE for text in texts)]
    exact, rounded = (Encoder(folder, quantization=q).encode(texts, show_progress=False) for q in (None, "int8"))
    found = compare_vectors(exact, rounded)
    assert found.min_cosine > 0.97
    assert found.mean_cosine > 0.99
    assert found.rank_correlation > 0.99
