#!/usr/bin/env python3
"""Makes the demo verifier and the demo chats of eaglet, from start to finish.

    make_demo.py --teacher smollm2-135m --out bin/demo --work scratch

Three stages; each leaves its result in the scratch folder or in --out, and an
answers file that is already there is used again:

1. answers   Questions of our own (lists and templates below) are answered by
             SmolLM2-135M-Instruct, greedily, in one to three sentences. Each
             template also gives the first words of the answer, which keeps the
             style narrow and regular.
2. verifier  A byte-level BPE tokenizer and a small Llama are trained from
             scratch on those chats; the result goes to OUT/verifier (bfloat16).
3. chats     The small verifier answers the questions itself (greedy, read back
             from the bfloat16 file): OUT/chats.jsonl for training a draft,
             OUT/held_out.jsonl with questions of neither training, and
             WORK/report.json with the measurements quoted in README.md.

The only input besides this file is the teacher's folder in Hugging Face layout.
Needs torch, transformers, safetensors, tokenizers. Seeds are fixed; on another
CPU or another torch the rounding, and so the texts, may differ a little.
"""
import argparse, copy, json, math, random, re, time
from pathlib import Path

import torch

SEED = 20
HELD_OUT = 40          # chats in held_out.jsonl
CHATS = 480            # chats in chats.jsonl
VOCAB = 2048
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]   # ids 0, 1, 2
MAX_ANSWER = 100       # tokens of the small verifier, per answer
LONG_ENOUGH = 22       # tokens of the teacher after which the first of two sentences is enough
SYSTEM = "Answer in two short, simple sentences."           # for the teacher only

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}

# ---------------------------------------------------------------- questions --
# A domain is a list of things and a list of (question phrasings, first words of
# the answer, sentences at most). {x} thing, {a} with article, {s} plural, {A} {S}
# the same with a capital. "thing/plural" gives an irregular plural.
DOMAINS = {
    "tool": (
        "spoon,fork,knife/knives,whisk,pan,pot,kettle,ladle,bowl,plate,cup,oven,toaster,grater,"
        "sieve,cutting board,rolling pin,blender,hammer,saw,screwdriver,wrench,drill,ladder,"
        "broom,mop,bucket,sponge,rake,shovel,hoe,wheelbarrow,watering can,garden hose,pair of scissors/scissors,"
        "needle,rope,tape measure,paintbrush/paintbrushes,flashlight,candle,umbrella,clock,basket,lamp,"
        "pencil,notebook,towel,pillow,blanket,iron,vacuum cleaner,fan,lock,mirror,bicycle pump",
        [(["What is {a} used for?", "What do people use {a} for?", "What can I do with {a}?"], "{A} is used to", 2),
         (["How do I keep {a} clean?", "How should I clean {a}?", "What is the best way to clean {a}?"], "To clean {a}, you can", 2),
         (["How do I choose a good {x}?", "How can I find a good {x}?"], "To choose a good {x}, look for", 2),
         (["Why is {a} useful?", "Why do people keep {a} at home?"], "{A} is useful because", 2),
         (["How do I use {a} safely?", "Is it hard to use {a} safely?"], "To use {a} safely, you should", 2)]),
    "animal": (
        "cat,dog,rabbit,horse,cow,sheep/sheep,goat,pig,duck,hen,goose/geese,owl,eagle,sparrow,parrot,penguin,"
        "fox/foxes,wolf/wolves,bear,deer/deer,squirrel,hedgehog,mouse/mice,bat,beaver,otter,seal,whale,dolphin,shark,"
        "octopus/octopuses,crab,frog,turtle,snake,lizard,crocodile,elephant,giraffe,lion,tiger,monkey,zebra,camel,"
        "kangaroo,koala,panda,bee,butterfly/butterflies,ant,spider,snail,worm,salmon/salmon,swan,crow",
        [(["What do {s} eat?", "What does {a} eat?", "What food do {s} like?"], "{S} eat", 2),
         (["Where do {s} live?", "Where can I find {s}?", "Where does {a} live?"], "{S} live in", 2),
         (["How do {s} move?", "How does {a} move around?"], "{S} move by", 2),
         (["Why do people like {s}?", "What is special about {s}?"], "People like {s} because", 2),
         (["How do {s} take care of their young?", "How does {a} raise its young?"], "{S} take care of their young by", 2),
         (["How do {s} stay safe?", "How does {a} stay safe from danger?"], "{S} stay safe by", 2),
         (["What do {s} look like?", "Can you describe {a}?"], "{A} is an animal with", 2)]),
    "plant": (
        "tomato/tomatoes,carrot,potato/potatoes,onion,pea,bean,pumpkin,cucumber,pepper,cabbage/cabbages,radish/radishes,"
        "strawberry/strawberries,apple tree,pear tree,lemon tree,cherry tree,rose,tulip,sunflower,daisy/daisies,lily/lilies,"
        "orchid,cactus/cacti,fern,basil plant,mint plant,lavender plant,oak tree,pine tree,grape vine,"
        "blueberry bush/blueberry bushes,melon,leek,beet,daffodil,violet,herb,house plant",
        [(["How do I grow {s}?", "How can I grow {s} at home?", "What do I need to grow {s}?"], "To grow {s}, you need", 2),
         (["How often should I water {s}?", "How much water do {s} need?"], "You should water {s}", 2),
         (["When should I plant {s}?", "What is the best time to plant {s}?"], "The best time to plant {s} is", 2),
         (["What soil is good for {s}?", "Which soil do {s} like?"], "{S} grow best in soil that", 2),
         (["How much sun do {s} need?", "Do {s} need a lot of sun?"], "{S} need", 2),
         (["How do I keep pests away from {s}?", "What can I do about bugs on my {s}?"], "To keep pests away from {s}, you can", 2)]),
    "food": (
        "rice,pasta,bread,soup,salad,pancakes,scrambled eggs,roast chicken,baked fish,mashed potatoes,oatmeal,"
        "apple pie,vegetable stew,pizza,beans,cheese,yogurt,honey,fruit salad,noodles,chocolate cake,cookies,"
        "tomato sauce,lentils,roasted carrots,corn,mushrooms,tea,coffee,lemonade,muffins,omelettes,fried rice,"
        "steamed broccoli,stuffed peppers,garlic bread,peanut butter,jam,popcorn,porridge",
        [(["How do I make {x}?", "How can I prepare {x}?", "What is an easy way to make {x}?"], "To make {x}, you need to", 3),
         (["What goes well with {x}?", "What can I serve with {x}?"], "A good thing to serve with {x} is", 2),
         (["How should I store {x}?", "How do I keep {x} fresh?"], "To keep {x} fresh, you should", 2),
         (["How can I make {x} taste better?", "What can I add to {x} for more taste?"], "You can make {x} taste better by", 2),
         (["Why do people like {x}?", "What is good about {x}?"], "People like {x} because", 2)]),
    "weather": (
        "rain,snow,wind,fog,thunder,lightning,hail,frost,ice,a rainbow,a cloud,a storm,a hurricane,a tornado,a drought,"
        "a flood,a heat wave,a cold winter,a hot summer,a sunny day,spring,autumn,dew,mist,a blizzard,a light breeze,"
        "the sunrise,the sunset,the moon,the tide",
        [(["What is {x}?", "Can you explain {x}?", "Can you tell me what {x} is?"], "{X} is", 2),
         (["What causes {x}?", "Why do we get {x}?"], "{X} is caused by", 2),
         (["How does {x} change our day?", "What does {x} do to people?"], "{X} can", 2),
         (["How can I prepare for {x}?", "How do I get ready for {x}?"], "To prepare for {x}, you can", 2)]),
    "travel": (
        "the beach,the mountains,the forest,the desert,a big city,a small village,an island,a lake,a river,a farm,"
        "a museum,a zoo,a national park,a castle,a train station,an airport,a market,a campsite,a ski resort,a harbor,"
        "a waterfall,a library,a theater,a botanical garden,a cave,an old town,the countryside,a hot spring,a vineyard,a lighthouse",
        [(["What should I pack for a trip to {x}?", "What do I need for a visit to {x}?"], "For a trip to {x}, you should pack", 2),
         (["What can I do at {x}?", "What is there to do at {x}?"], "At {x}, you can", 2),
         (["Why do people visit {x}?", "Why should I visit {x}?"], "People visit {x} because", 2),
         (["How do I stay safe at {x}?", "What should I watch out for at {x}?"], "To stay safe at {x}, you should", 2),
         (["When is the best time to visit {x}?", "When should I go to {x}?"], "The best time to visit {x} is", 2)]),
    "habit": (
        "drinking water,walking,sleeping well,eating vegetables,eating fruit,stretching,running,swimming,cycling,"
        "reading,writing a diary,cooking at home,brushing your teeth,washing your hands,taking breaks,deep breathing,"
        "spending time outside,talking with friends,laughing,listening to music,dancing,gardening,yoga,resting,"
        "getting up early,eating breakfast,cleaning your room,saving money,saying thank you,helping others,"
        "playing a game,learning a language,painting,drawing,singing,knitting,fishing,hiking,playing the piano,taking photos",
        [(["Why is {x} good for me?", "Why is {x} a good habit?", "What is good about {x}?"], "{X} is good for you because", 2),
         (["How can I make {x} a habit?", "How do I make {x} part of my day?"], "You can make {x} a habit by", 2),
         (["How do I start with {x}?", "How can a beginner start with {x}?"], "To start with {x}, you can", 2),
         (["What do I need for {x}?", "Which things do I need for {x}?"], "For {x}, you need", 2),
         (["How does {x} make people feel?", "How will I feel after {x}?"], "{X} makes people feel", 2)]),
    "job": (
        "baker,teacher,farmer,nurse,doctor,fisherman/fishermen,carpenter,plumber,gardener,pilot,sailor,cook,waiter,"
        "painter,writer,singer,musician,librarian,firefighter,police officer,mail carrier,bus driver,tailor,barber,"
        "mechanic,electrician,dentist,shepherd,beekeeper,builder,journalist,photographer,scientist,shop clerk,judge",
        [(["What does {a} do?", "What is the job of {a}?", "What does {a} do all day?"], "{A} is a person who", 2),
         (["How do I become {a}?", "How can I become a good {x}?"], "To become {a}, you need to", 2),
         (["Why are {s} important?", "Why do we need {s}?"], "{S} are important because", 2),
         (["What tools does {a} use?", "Which tools do {s} use?"], "{A} uses tools like", 2)]),
}
HEROES = ("a little fox,an old farmer,a brave mouse,a lost kitten,a kind baker,a young girl,a lazy cat,a small bird,"
          "a happy dog,a shy rabbit,a clever crow,a tired traveler,a boy named Tom,a girl named Anna,a wise owl,"
          "a hungry bear,a tiny snail,an old sailor,a gentle horse,a curious frog").split(",")
PLACES = ("a river,a dark forest,a big storm,a red kite,a magic seed,a golden key,a snowy hill,a quiet garden,"
          "a small boat,a warm kitchen,a broken clock,a tall tree,a lost letter,a blue stone,a new friend").split(",")
STORY = (["Tell me a short story about {x} and {y}.", "Can you tell me a story about {x} and {y}?"],
         "Once upon a time, there was {x}", 3)


def article(x):
    return ("an " if x[0] in "aeiou" else "a ") + x


def plural(x):
    if x.endswith(("s", "sh", "ch", "x")):
        return x + "es"
    return x[:-1] + "ies" if x.endswith("y") and x[-2] not in "aeiou" else x + "s"


def questions():
    """All questions: dicts of group (domain and thing), phrasings, opening, sentences."""
    out = []
    for domain, (things, templates) in DOMAINS.items():
        for at, thing in enumerate(things.split(",")):
            x, _, p = thing.partition("/")
            s = p or plural(x)
            names = {"x": x, "a": article(x), "s": s}
            names |= {k.upper(): v[0].upper() + v[1:] for k, v in names.items()}
            for i, (phrasings, opening, n) in enumerate(templates):
                out.append({"group": f"{domain}-{x}".replace(" ", "-"), "n": i, "sentences": n, "at": at, "names": names,
                            "phrasings": [f.format(**names) for f in phrasings],
                            "opening": opening.format(**names)})
    rng = random.Random(SEED)
    pairs = rng.sample([(h, p) for h in HEROES for p in PLACES], 240)
    for x, y in pairs:
        names = {"x": x, "s": y, "a": "the" + x[x.index(" "):], "X": x.capitalize(), "A": "The" + x[x.index(" "):]}
        out.append({"group": f"story-{x}-{y}".replace(" ", "-"), "n": 0, "sentences": STORY[2], "at": HEROES.index(x), "names": names,
                    "phrasings": [f.format(x=x, y=y) for f in STORY[0]],
                    "opening": STORY[1].format(x=x)})
    rng.shuffle(out)
    return out


# ------------------------------------------------------- stage 1: answers ----
def whole_sentences(text):
    """Text up to the end of its last whole sentence, or '' if there is none."""
    ends = [m.end() for m in re.finditer(r"[.!?](?=\s|$)", text)]
    return text[: ends[-1]] if ends else ""


def repeats(text):
    """Whether some four words in a row come twice."""
    w = re.findall(r"[a-z']+", text.lower())
    return len(set(zip(w, w[1:], w[2:], w[3:]))) < len(w) - 3


def acceptable(text):
    return (text.isascii() and 30 <= len(text) <= 420 and text[-1] in ".!?"
            and not re.search(r"[\n:;*#\[\]<>{}()\"_/\\]|\d\.|As an AI|language model", text))


@torch.inference_mode()
def teacher_answers(folder, qs, path, batch, max_new, minutes):
    """Greedy answers by the teacher, in batches of like length; rows leave the batch when done."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    tok = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    eos = {tok.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")}
    ends = {i for t, i in tok.get_vocab().items() if t in (".", "!", "?", ".\u010a", "!\u010a")}

    def enough(ids, n):     # stop after n sentences, or at the end of one once the answer is long enough
        return ids[-1] in ends and (sum(u in ends for u in ids) >= n or len(ids) >= LONG_ENOUGH * (n - 1))

    # the system turn is the same for all: computed once, its cache copied into each batch
    head = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    head_ids = tok(head, add_special_tokens=False, return_tensors="pt")["input_ids"]
    head_cache = model(input_ids=head_ids, use_cache=True, logits_to_keep=1).past_key_values
    h = head_ids.shape[1]
    jobs = []
    for q in qs:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": q["phrasings"][0]}]
        text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + q["opening"]
        assert text.startswith(head)
        text = text[len(head):]
        jobs.append((tok(text, add_special_tokens=False)["input_ids"], q))
    batches = [sorted(jobs[i:i + 8 * batch], key=lambda j: len(j[0])) for i in range(0, len(jobs), 8 * batch)]
    batches = [b[i:i + batch] for b in batches for i in range(0, len(b), batch)]
    start, tokens, kept = time.time(), 0, []
    for b, rows in enumerate(batches):
        width = max(len(ids) for ids, _ in rows)
        pad = [width - len(ids) for ids, _ in rows]
        ids = torch.tensor([[2] * p + r for p, (r, _) in zip(pad, rows)])
        mask = torch.tensor([[0] * p + [1] * (width - p) for p in pad])
        pos = h + (mask.cumsum(1) - 1).clamp(min=0)
        mask = torch.cat([mask.new_ones(len(rows), h), mask], 1)
        new = [[] for _ in rows]
        alive = list(range(len(rows)))
        cache = copy.deepcopy(head_cache)
        cache.batch_repeat_interleave(len(rows))
        for _ in range(max_new):
            r = model(input_ids=ids, attention_mask=mask, position_ids=pos, past_key_values=cache,
                      use_cache=True, logits_to_keep=1)
            cache, nxt = r.past_key_values, r.logits[:, -1].argmax(-1)
            keep = []
            for k, (row, t) in enumerate(zip(alive, nxt.tolist())):
                new[row].append(t)
                if t not in eos and not enough(new[row], rows[row][1]["sentences"]):
                    keep.append(k)
            tokens += len(alive)
            if not keep:
                break
            if len(keep) < len(alive):
                sel = torch.tensor(keep)
                cache.batch_select_indices(sel)
                nxt, mask, pos, alive = nxt[sel], mask[sel], pos[sel], [alive[k] for k in keep]
            ids, pos = nxt[:, None], pos[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
        for (_, q), t in zip(rows, new):
            rest = tok.decode([u for u in t if u not in eos]).rstrip()
            rest = ("" if rest[:1] in (" ", ",", ".", "'") else " ") + rest
            answer = whole_sentences(q["opening"] + rest)
            if answer:
                kept.append(q | {"answer": answer})
        took = time.time() - start
        path.with_suffix(".part").write_text("".join(json.dumps(k) + "\n" for k in kept))
        if b % 4 == 0:
            print(f"answers: batch {b + 1}/{len(batches)}, kept {len(kept)}, {tokens / took:.0f} tokens/s, {took:.0f} s", flush=True)
        if took > minutes * 60:
            break
    seen, unique = set(), []    # what reads badly is dropped later, by acceptable() and repeats()
    for k in kept:
        if k["answer"] not in seen:
            seen.add(k["answer"])
            unique.append(k)
    path.write_text("".join(json.dumps(k) + "\n" for k in unique))
    info = {"asked": sum(len(r) for r in batches[: b + 1]), "kept": len(unique), "tokens": tokens,
            "seconds": round(took), "tokens_per_s": round(tokens / took)}
    path.with_suffix(".info.json").write_text(json.dumps(info))
    print("answers:", info)


# ------------------------------------------------------ stage 2: verifier ----
def renamed(answer, old, new):
    """The answer with one thing's names put in place of another's, or None if a name is left over."""
    if old["x"] == old["s"]:
        return None         # singular and plural look alike
    keys = sorted(old, key=lambda k: -len(old[k]))
    found = re.compile("|".join(rf"\b{re.escape(old[k])}\b" for k in keys))
    by_text = {old[k]: new.get(k, new["x"]) for k in reversed(keys)}
    text = found.sub(lambda m: by_text[m.group()], answer)
    core = old["x"].split()[-1]
    return None if re.search(core, found.sub("", answer), re.I) else text


def spread(answers):
    """One answer for each question: its own, or else (the teacher is slow) one given to the same
    question about another thing, renamed. Few answers for many questions keep the style regular."""
    own = {(a["group"], a["n"]): a for a in answers}
    donors = {}
    for a in answers:
        donors.setdefault((a["group"].split("-")[0], a["n"]), []).append(a)
    out = []
    for q in questions():
        a = own.get((q["group"], q["n"]))
        if a:
            out.append(q | {"answer": a["answer"], "own": True})
            continue
        options = donors.get((q["group"].split("-")[0], q["n"]), [])
        # the lists keep like things together, so a near thing's answer fits best
        for d in sorted(options, key=lambda d: abs(d["at"] - q["at"])):
            text = renamed(d["answer"], d["names"], q["names"])
            if text and acceptable(text):
                out.append(q | {"answer": text, "own": False})
                break
    return out


def split(chats):
    """Training and held-out chats; the held-out questions are asked in no training chat."""
    rng = random.Random(SEED + 1)
    groups = {}
    for a in chats:
        groups.setdefault(a["group"], []).append(a)
    many = sorted(g for g, v in groups.items() if len(v) > 2)
    stories = sorted(g for g in groups if g.startswith("story"))
    # from each chosen group two questions, of which one may become a follow-up; and some stories
    rng.shuffle(many), rng.shuffle(stories)
    held = [rng.sample(groups[g], 2) for g in many[: HELD_OUT + 4]] + [groups[g][:1] for g in stories[:8]]
    out = {id(a) for h in held for a in h}
    return [a for a in chats if id(a) not in out], held


def train_tokenizer(texts, out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    assert tok.get_vocab_size() == VOCAB, tok.get_vocab_size()
    tok.save(str(out / "tokenizer.json"))
    (out / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONFIG["max_position_embeddings"],
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>", "add_prefix_space": False, "add_bos_token": False, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE}, indent=2) + "\n")
    return tok


def render(turns):
    """ChatML as in CHAT_TEMPLATE, as (text, in_answer) pieces; an answer ends with <|im_end|>."""
    out = []
    for q, a in turns:
        out += [(f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n", 0), (f"{a}<|im_end|>", 1), ("\n", 0)]
    return out


def encode(tok, turns):
    ids, weight = [], []
    for text, answer in render(turns):
        piece = tok.encode(text, add_special_tokens=False).ids
        ids += piece
        weight += [1.0 if answer else 0.1] * len(piece)
    return ids, weight


def epoch_chats(train, rng, two_turn=0.25):
    """One pass over the answers: random phrasings; some become the second turn of another chat."""
    by_group, chats = {}, []
    for a in train:
        by_group.setdefault(a["group"], []).append(a)
    for g in by_group.values():
        rng.shuffle(g)
        while g:
            take = 2 if len(g) > 1 and rng.random() < two_turn else 1
            chats.append([(rng.choice(a["phrasings"]), a["answer"]) for a in (g.pop() for _ in range(take))])
    return chats


def batches_of(rows, tokens, rng):
    """Padded batches of rows of like length, about `tokens` tokens each."""
    rows = sorted(rows, key=lambda r: (len(r[0]), rng.random()))
    out, now = [], []
    for r in rows:
        if now and (len(now) + 1) * len(r[0]) > tokens:
            out.append(now)
            now = []
        now.append(r)
    out.append(now)
    rng.shuffle(out)
    for b in out:
        w = max(len(i) for i, _ in b)
        yield (torch.tensor([i + [0] * (w - len(i)) for i, _ in b]),
               torch.tensor([k + [0.0] * (w - len(k)) for _, k in b]))


def loss_of(model, ids, weight):
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return ce, weight[:, 1:].flatten()


@torch.no_grad()
def val_loss(model, tok, chats):
    """Mean loss over the answers' tokens only."""
    total = count = 0.0
    for ids, w in batches_of([encode(tok, c) for c in chats], 4096, random.Random(0)):
        ce, w = loss_of(model, ids, w)
        total += ce[w == 1].sum().item()
        count += (w == 1).sum().item()
    return total / count


def llama(config):
    from transformers import LlamaConfig, LlamaForCausalLM
    c = {k: v for k, v in config.items() if k not in ("architectures", "torch_dtype", "rope_theta", "rope_scaling")}
    c["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return LlamaForCausalLM(LlamaConfig(**c, attn_implementation="sdpa"))


def train_verifier(answers, out, minutes, epochs, tokens, lr, resume=False):
    from safetensors.torch import load_file, save_file
    out.mkdir(parents=True, exist_ok=True)
    train, held = split(answers)
    held_chats = [[(h["phrasings"][0], h["answer"])] for g in held for h in g]
    tok = train_tokenizer([t for c in [[(p, a["answer"]) for p in a["phrasings"]] for a in train]
                           for p in c for t in (f"user\n{p[0]}", f"assistant\n{p[1]}")], out)
    torch.manual_seed(SEED)
    model = llama(CONFIG)
    if resume:
        model.load_state_dict({k: v.float() for k, v in load_file(str(out / "model.safetensors")).items()})
    params = sum(p.numel() for p in model.parameters())
    decay = [p for p in model.parameters() if p.dim() > 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1},
                             {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}],
                            lr=lr, betas=(0.9, 0.98))
    # With epochs, the learning rate follows the steps (repeatable); without, the clock (fits in the minutes).
    rng, start, step, seen, epoch, log, frac = random.Random(SEED + resume), time.time(), 0, 0, 0, [], 0.0
    while frac < 1:
        chats = epoch_chats(train, rng)
        rows = list(batches_of([encode(tok, c) for c in chats], tokens, rng))
        total = count = 0.0
        for i, (ids, w) in enumerate(rows):
            frac = (epoch + (i + 1) / len(rows)) / epochs if epochs else (time.time() - start) / (60 * minutes)
            scale = min(1.0, (step + 1) / 40) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1, frac))))
            for g in opt.param_groups:
                g["lr"] = lr * scale
            ce, w = loss_of(model, ids, w)
            loss = (ce * w).sum() / w.sum()
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
            seen += ids.numel()
            total += ce.detach()[w == 1].sum().item()
            count += (w == 1).sum().item()
            if step % 50 == 0:
                print(f"train: step {step}, {frac:.2f} done, loss {loss.item():.3f}", flush=True)
            if frac >= 1:
                break
        epoch += 1
        took = time.time() - start
        log.append({"epoch": epoch, "train": round(total / count, 3), "held_out": round(val_loss(model, tok, held_chats), 3)})
        print(f"train: epoch {epoch}, step {step}, {seen / took:.0f} tokens/s, {took:.0f} s, {log[-1]}", flush=True)
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    if CONFIG["tie_word_embeddings"]:
        state.pop("lm_head.weight")
    save_file(state, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "do_sample": False, "max_new_tokens": MAX_ANSWER}, indent=2) + "\n")
    return {"parameters": params, "epochs": epoch, "steps": step, "tokens": seen, "seconds": round(took),
            "tokens_per_s": round(seen / took), "train_chats": len(train), "batch_tokens": tokens, "lr": lr,
            "train_loss": log[-1]["train"], "held_out_loss": log[-1]["held_out"],
            "lowest_held_out_loss": min(e["held_out"] for e in log), "log": log}


# --------------------------------------------------------- stage 3: chats ----
@torch.inference_mode()
def greedy(model, prompts, max_new=MAX_ANSWER, stop=2, batch=64):
    """Greedy continuations: per prompt the new ids (with the stop id, if reached) and their probabilities."""
    result = [None] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for at in range(0, len(order), batch):
        part = order[at: at + batch]
        width = max(len(prompts[i]) for i in part)
        pad = [width - len(prompts[i]) for i in part]
        ids = torch.tensor([[0] * p + prompts[i] for p, i in zip(pad, part)])
        mask = (torch.arange(width)[None] >= torch.tensor(pad)[:, None]).long()
        pos = (mask.cumsum(1) - 1).clamp(min=0)
        new, done, cache = [([], []) for _ in part], [False] * len(part), None
        for _ in range(max_new):
            r = model(input_ids=ids, attention_mask=mask, position_ids=pos, past_key_values=cache, use_cache=True)
            cache = r.past_key_values
            top = r.logits[:, -1].float().softmax(-1).max(-1)
            for k, (t, p) in enumerate(zip(top.indices.tolist(), top.values.tolist())):
                if not done[k]:
                    new[k][0].append(t)
                    new[k][1].append(p)
                    done[k] = t == stop
            if all(done):
                break
            ids, pos = top.indices[:, None], pos[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(part), 1)], 1)
        for k, i in enumerate(part):
            result[i] = new[k]
    return result


def answer_chats(model, tok, chats):
    """Answers lists of questions by the verifier, turn by turn; gives [(turns, ended, probabilities)]."""
    state = [([], True, []) for _ in chats]
    for turn in range(max(len(c) for c in chats)):
        todo = [i for i, c in enumerate(chats) if len(c) > turn and state[i][1]]
        prompts = [tok.encode("".join(t for t, _ in render(state[i][0]))
                              + f"<|im_start|>user\n{chats[i][turn]}<|im_end|>\n<|im_start|>assistant\n").ids for i in todo]
        for i, (ids, probs) in zip(todo, greedy(model, prompts)):
            ended = ids[-1] == 2
            text = tok.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
            state[i] = (state[i][0] + [(chats[i][turn], text)], ended, state[i][2] + probs)
    return state


def write_chats(answers, out):
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer
    folder = out / "verifier"
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()    # bfloat16 values, float32 sums
    hf = AutoTokenizer.from_pretrained(folder)
    check = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    whole = hf.apply_chat_template(check, tokenize=False)
    assert whole == "".join(t for t, _ in render([("Why?", "So.")]))
    assert whole.startswith(hf.apply_chat_template(check[:1], tokenize=False, add_generation_prompt=True))
    assert hf(whole)["input_ids"] == tok.encode(whole).ids

    rng = random.Random(SEED + 2)
    train, held = split(answers)
    groups = {}
    for q in train:
        groups.setdefault(q["group"], []).append(q)
    asked = []
    for name in sorted(groups):
        g = groups[name]
        rng.shuffle(g)
        while g:
            n = 2 if len(g) > 1 and rng.random() < 0.15 else 1
            asked.append((name, [rng.choice(g.pop()["phrasings"]) for _ in range(n)]))
    rng.shuffle(asked)
    asked = asked[: CHATS * 3 // 2]
    rng.shuffle(held)
    held_asked = [(h[0]["group"], [rng.choice(a["phrasings"]) for a in h[: 2 if i % 5 == 0 else 1]])
                  for i, h in enumerate(held)]
    files = {}
    for name, todo, want in (("held_out", held_asked, HELD_OUT), ("chats", asked, CHATS)):
        rows, seen, lengths, n_tokens = [], set(), [], 0
        states = answer_chats(model, tok, [q for _, q in todo])
        answered = [(len(q), s) for (_, q), s in zip(todo, states)]
        ended = sum(s[1] for _, s in answered) / len(answered)
        probs = [p for _, s in answered for p in s[2]]
        within80 = sum(s[1] and len(s[2]) <= 80 * n for n, s in answered) / len(answered)
        for (group, _), (turns, done, _) in zip(todo, states):
            size = sum(len(tok.encode(t).ids) for t, _ in render(turns))
            text = turns[-1][1]
            if not (done and 40 <= size <= 200 and all(acceptable(a) for _, a in turns)) or text in seen or len(rows) == want:
                continue
            seen.add(text)
            lengths.append(size)
            ident = f"{name.replace('_', '-')}-{len(rows):03d}"
            if len(rows) % 5 == 4:
                rows.append({"id": ident, "messages": [m for q, a in turns for m in (
                    {"role": "user", "content": q}, {"role": "assistant", "content": a})]})
            else:
                rows.append({"id": ident, "conversations": [m for q, a in turns for m in (
                    {"from": "human", "value": q}, {"from": "gpt", "value": a})]})
        (out / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        files[name] = {"asked": len(todo), "kept": len(rows), "two_turn": sum(len(list(r.values())[1]) == 4 for r in rows),
                       "tokens": [min(lengths), round(sum(lengths) / len(lengths), 1), max(lengths)],
                       "ended": round(ended, 3), "ended_within_80": round(within80, 3),
                       "mean_top1": round(sum(probs) / len(probs), 3),
                       "share_top1_above_half": round(sum(p > 0.5 for p in probs) / len(probs), 3)}
        if name == "held_out":
            files["samples"] = [s[0] for s in states[:14]]
        print(name, files[name], flush=True)
    return files


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--teacher", type=Path, required=True, help="SmolLM2-135M-Instruct in Hugging Face layout")
    ap.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="where verifier/ and the chats go")
    ap.add_argument("--work", type=Path, required=True, help="scratch folder (the teacher's answers)")
    ap.add_argument("--stages", default="answers,verifier,chats")
    ap.add_argument("--answer-minutes", type=float, default=13, help="stop asking the teacher after this long")
    ap.add_argument("--train-minutes", type=float, default=10)
    ap.add_argument("--resume", action="store_true", help="train on from the weights in OUT/verifier")
    ap.add_argument("--epochs", type=int, help="train this many epochs instead, however long it takes")
    ap.add_argument("--batch", type=int, default=48, help="questions asked at once")
    ap.add_argument("--max-new", type=int, default=56, help="the teacher's tokens per answer, at most")
    ap.add_argument("--batch-tokens", type=int, default=1024, help="tokens per training step")
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--limit", type=int, help="ask only this many questions (for a try)")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    a.work.mkdir(parents=True, exist_ok=True)
    path = a.work / "answers.jsonl"
    qs = questions()[: a.limit]
    print(f"{len(qs)} questions, {sum(len(q['phrasings']) for q in qs)} with all phrasings")
    if "answers" in a.stages and not path.exists():
        teacher_answers(a.teacher, qs, path, a.batch, a.max_new, a.answer_minutes)
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    answers = [x for x in answers if acceptable(x["answer"]) and not repeats(x["answer"])]
    report_path = a.work / "report.json"
    report = json.loads(report_path.read_text()) if report_path.exists() else {}
    report["answers"] = json.loads(path.with_suffix(".info.json").read_text())
    asked = {(q["group"], q["n"]): q for q in questions()}
    answers = spread([asked[x["group"], x["n"]] | x for x in answers])
    report["spread"] = {"chats": len(answers), "own_answer": sum(x["own"] for x in answers)}
    print(report["spread"], flush=True)
    if "verifier" in a.stages:
        report["verifier"] = train_verifier(answers, a.out / "verifier", a.train_minutes, a.epochs, a.batch_tokens, a.lr, a.resume)
        report_path.write_text(json.dumps(report, indent=1) + "\n")
    if "chats" in a.stages:
        report["chats"] = write_chats(answers, a.out)
    report_path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
