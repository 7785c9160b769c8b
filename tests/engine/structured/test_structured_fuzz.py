"""Random walks through random constraints, over tokens that cross every border: what comes out is checked by
`re` and `jsonschema`, and a mask never allows what the matcher refuses.

The vocabulary has all bytes, pieces of characters, several characters in one token, bytes that are no text.
"""

from __future__ import annotations

import json
import re
from random import Random

import jsonschema
import numpy as np
import pytest
import random_grammars as grammars
from xgrammar import GrammarCompiler, GrammarMatcher

from deepinfer_ray.engine import grammar_repair
from deepinfer_ray.engine.grammar_pool import Build
from deepinfer_ray.engine.grammar_repair import FORMAT
from deepinfer_ray.engine.grammar_spec import GrammarSpec
from deepinfer_ray.engine.grammar_worker import Job, compile_job
from deepinfer_ray.engine.mock import EOS
from deepinfer_ray.engine.structured import StructuredOutputs, _Try
from deepinfer_ray.errors import RowError

LONGEST = 100
STRUCTURE = [
    *('"}', '":', '", "', '"]', "},", '{"', '": "', "null", "true", "12", "-1", "e+", "\n  ", '\\"', "\\u00"),
    *('","', ": ", "[{", "}]", 'a"', "foo", 'bar"', 'name": ', '"é', "0c", "]\n"),
]


class Walker:
    """Constraints over one vocabulary, compiled here."""

    def __init__(self, workshop) -> None:
        self.pieces = self._vocabulary(Random(7))
        special = {0: "<s>", 2: "<pad>"}
        scheduler = workshop.engine(max_seqs=2).scheduler
        self.structured = StructuredOutputs(scheduler, self.pieces, (EOS,), special, pool=workshop.pool)
        self.info = self.structured.vocabulary.tokenizer_info()

    @staticmethod
    def _vocabulary(random: Random) -> list[bytes]:
        chars = [*grammars.CHARS, *grammars.OTHERS, "à", "ü", "\u2000", "\u20ff", "一", "鿿", *"{}:,"]
        pieces = [b"", b"", b"", *(bytes([byte]) for byte in range(256)), *(s.encode() for s in STRUCTURE)]
        while len(pieces) < 1200:
            text = "".join(random.choice(chars) for _ in range(random.randint(1, 4))).encode()
            begin = random.randrange(len(text))
            pieces.append(text[begin : random.randint(begin + 1, len(text))])
        firsts = [0xE0, 0xED, 0xF0, 0xF4, 0xC3, 0x80, 0x9F, 0xA0, 0xBF, 0x41]
        pieces += [bytes(random.choices(firsts, k=random.randint(2, 3))) for _ in range(100)]
        known: set[bytes] = set()
        return [piece for piece in pieces if not piece or not (piece in known or known.add(piece))]

    def build(self, asked) -> tuple[GrammarSpec, Build]:
        spec = GrammarSpec.of(asked)
        job = Job(0, spec.kind, spec.text, spec.any_whitespace)
        build = Build(job)
        build.compiled = compile_job(GrammarCompiler(self.info, max_threads=1, cache_enabled=False), job)
        return spec, build

    def takes(self, build: Build, text: str) -> bool:
        return GrammarMatcher(build.compiled).accept_string(text)

    def walk(self, spec: GrammarSpec, build: Build, random: Random, eager: float) -> bytes | None:
        """What a random model writes that ends with a chance of `eager` where it may; None if it is cut."""
        grammar = self.structured._grammar(spec, build)
        written: list[int] = []
        while len(written) < LONGEST:
            failures: dict[int, tuple[str, str]] = {}
            one = _Try(0, grammar, 0, [], len(written), 0, self.structured._plain)
            masks = self.structured._fill([one], failures)
            assert not failures, (spec.text, written)
            assert masks is not None
            ids = np.flatnonzero(np.unpackbits(masks.words[0].view(np.uint8), bitorder="little"))
            ids = ids[ids < len(self.pieces)].tolist()
            if EOS in ids and (len(ids) == 1 or random.random() < eager):
                return b"".join(self.pieces[token] for token in written)
            token = random.choice([token for token in ids if token != EOS])
            assert grammar.accept(token), (spec.text, written, self.pieces[token])
            written.append(token)
        return None


@pytest.fixture(scope="module")
def walker(workshop) -> Walker:
    return Walker(workshop)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_patterns_and_grammars_mean_what_they_say(walker, kind, part):
    ended = 0
    for seed in range(part * 100, part * 100 + 100):
        random = Random(seed)
        language = grammars.random_language(random)
        text = language.pattern if kind == "regex" else f"root ::= {language.ebnf}"
        spec, build = walker.build({kind: text})
        assert walker.takes(build, language.member), (text, language.member)
        for _ in range(3):
            written = walker.walk(spec, build, random, 0.3)
            if written is not None:
                ended += 1
                assert re.fullmatch(language.python, written.decode(), re.DOTALL), (text, written)
    assert ended > 250


def test_patterns_inside_json_give_json(walker):
    ended, refused = 0, []
    for seed in range(150):
        random = Random(seed)
        language = grammars.random_language(random)
        # A string with a length bound beside it: such a grammar is mended.
        bounded = {"type": "string", "maxLength": 3}
        members = {"é0": {"type": "string", "pattern": language.pattern}, "b": bounded}
        schema = {"type": "object", "properties": members, "required": ["é0", "b"]}
        try:
            spec, build = walker.build({"json": schema, "disable_any_whitespace": True})
        except (RowError, ValueError) as error:
            refused.append(str(error))
            continue
        written = walker.walk(spec, build, random, 0.9)
        if written is not None:
            ended += 1
            value = json.loads(written)
            assert re.fullmatch(language.python, value["é0"], re.DOTALL), (language.pattern, value)
            assert len(value["b"]) <= 3
    assert ended > 60
    assert len(refused) > 20
    assert all("JSON" in reason or "no completion matches it" in reason for reason in refused)


def test_schemas_over_tokens_that_cross_their_parts(walker, random_schemas):
    schemas = random_schemas(23)
    ended = 0
    for number in range(120):
        schema, random = schemas.schema(), Random(number)
        spec, build = walker.build({"json": schema, "disable_any_whitespace": number % 2 == 0})
        for _ in range(2):
            written = walker.walk(spec, build, random, 0.9)
            if written is not None:
                ended += 1
                jsonschema.Draft202012Validator(schema).validate(json.loads(written))
    assert ended > 200


NAMES = ["éa", "ßf0", "\u07ffb", "一0", "😀a", "\\x41b", 'a"b', "\x80a", "^a", "-a", "[a]", "$", "*", "a b"]


@pytest.mark.parametrize("name", NAMES)
def test_names_and_constants_survive_the_compiler(walker, name):
    """Beside a string with a length bound, and as a name that further members may not have."""
    quoted = json.dumps(name, ensure_ascii=False)
    _, build = walker.build({"json": {"anyOf": [{"const": name}, {"type": "string", "maxLength": 1}]}})
    assert walker.takes(build, quoted)
    schema = {"properties": {name: {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
    _, build = walker.build({"json": {"type": "object", **schema}, "disable_any_whitespace": True})
    assert walker.takes(build, '{"zz": true}')
    assert walker.takes(build, f"{{{quoted}: 1}}")
    assert not walker.takes(build, f"{{{quoted}: true}}")


def test_the_repair_knows_the_installed_compiler(walker):
    """A new version of the compiler needs a new look at what it gets wrong."""
    import xgrammar

    document = json.loads(xgrammar.Grammar.from_ebnf('root ::= "a"').serialize_json())
    assert document["__VERSION__"] == FORMAT


def test_another_compiler_is_told_of_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Its grammars stay as they are."""
    import xgrammar

    monkeypatch.setattr(grammar_repair, "FORMAT", "v0")
    grammar_repair._warn_of.cache_clear()
    grammar = xgrammar.Grammar.from_regex("[éa]+")
    with caplog.at_level("WARNING"):
        assert grammar_repair.repaired(grammar, json_strings=False) is grammar
        assert grammar_repair.repaired(grammar, json_strings=False) is grammar
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        f"xgrammar writes grammars as {FORMAT}"
    ]
