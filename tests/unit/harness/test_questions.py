"""Twenty questions of a newcomer: docs/index.md links to the page, and the page answers, under that heading."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"

# Question, page, heading (empty: the page's beginning), words of the answer.
QUESTIONS = [
    ("How do I see it work without a GPU?", "quickstart.md", "1. Run the demo", "make demo"),
    ("How do I install it for GPUs?", "install.md", "For GPUs", "make install BACKEND=cuda"),
    ("How do I move my TRL script?", "coming_from.md", "From TRL", "from grpo import GRPOConfig"),
    ("What is verl's rollout.n called here?", "coming_from.md", "Names", "`num_generations`"),
    ("How many GPUs does a 32B model need?", "sizing.md", "", "Qwen2.5-32B"),
    ("How many GPUs should generate?", "choosing.md", "2. How many of them generate?", "vllm_reserved_gpus"),
    (
        "Which batch size and learning rate?",
        "choosing.md",
        "4. Which batch, group and learning rate?",
        "`learning_rate`",
    ),
    ("Local, server or colocate?", "modes.md", "When to use which", "Use `colocate`"),
    ("Is my model supported?", "models.md", "Families", "Llama 3"),
    ("How do I start on Slurm?", "launch.md", "Slurm", "sbatch launch/train.sbatch"),
    ("How do I start on Kubernetes?", "launch.md", "Kubernetes", "kubectl apply"),
    ("How do I get more throughput?", "lookahead.md", "How to choose N", "Raise N"),
    ("What does a healthy run look like?", "reading_metrics.md", "Progress: does it learn?", "healthy"),
    ("Which side is the bottleneck?", "reading_metrics.md", "Speed: is the hardware busy?", "rollout/wait_share"),
    ("CUDA is out of memory: what now?", "out_of_memory.md", "", "per_device_train_batch_size"),
    ("My error has an id: what does it mean?", "troubleshooting.md", "GRPO-406", "OOM killer"),
    ("How do I resume after a crash?", "resume.md", "", "--resume auto"),
    ("May I change the number of GPUs?", "resume.md", "Another number of ranks: `grpo reshape`", "--ranks 14"),
    ("How do I measure the model?", "evaluation.md", "A saved model: `grpo eval`", "grpo eval"),
    ("How do I push the model to the Hub?", "hub.md", "", "push_to_hub"),
    ("Is it on-policy?", "faq.md", "Is it on-policy?", "one-step off-policy"),
    ("Which environment variables are there?", "environment.md", "A run", "GRPO_LOG"),
]
WORDS = (
    "throughput", "weight sync", "one-step off-policy", "asynchronous", "fault tolerance", "global batch size",
    "out of memory",
)  # fmt: skip
"""What people search for."""


def section_of(page: str, heading: str) -> str:
    if not heading:
        return page
    found = re.split(rf"^(#+) {re.escape(heading)}$", page, maxsplit=1, flags=re.MULTILINE)
    assert len(found) == 3, f"no heading {heading!r}"
    _, marks, rest = found
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(("question", "name", "heading", "answer"), QUESTIONS, ids=[each[0] for each in QUESTIONS])
def test_docs_answer_question_within_two_clicks(question: str, name: str, heading: str, answer: str) -> None:
    """One from the index to the page, one in its table of contents to the heading."""
    assert f"]({name}" in (DOCS / "index.md").read_text()
    assert answer in section_of((DOCS / name).read_text(), heading)


def test_section_of_page_ends_at_next_heading_of_level() -> None:
    page = "# a\n\n## b\nx\n### c\ny\n## d\nz\n"
    assert section_of(page, "b") == "\nx\n### c\ny\n"
    assert section_of(page, "c") == "\ny\n"


def test_questions_are_at_least_twenty() -> None:
    assert len({question for question, *_ in QUESTIONS}) >= 20


def test_docs_index_links_every_page() -> None:
    index = (DOCS / "index.md").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name != "index.md" and f"]({page.name}" not in index] == []


def test_docs_contain_search_terms() -> None:
    text = " ".join(" ".join(page.read_text() for page in DOCS.glob("*.md")).lower().split())
    assert [word for word in WORDS if word not in text] == []


def test_docs_figures_are_in_repository() -> None:
    for page in DOCS.glob("*.md"):
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text()):
            assert (DOCS / picture).exists(), f"{page.name}: {picture}"
    assert "unpkg" not in (ROOT / "mkdocs.yml").read_text()
    for figure in DOCS.glob("*.svg"):
        assert re.findall(r'(?:href|src)="https?:', figure.read_text()) == []


def test_architecture_and_changelog_are_short() -> None:
    assert len((DOCS / "architecture.md").read_text().split()) <= 1500
    unreleased = (ROOT / "CHANGELOG.md").read_text().partition("(unreleased)\n")[2].partition("\n## ")[0]
    assert len(unreleased.strip().splitlines()) <= 20
