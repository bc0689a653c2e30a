"use strict";
// Shows the samples of a run. Texts of models and datasets become text nodes only; nothing here parses HTML.
(async () => {
  const ABSENT = -32768, ROW = 26, OUTCOMES = ["trained", "surplus", "all_right", "all_wrong", "no_signal", "stale", "dropped", "expired"];
  const NAMES = { trained: "trained", surplus: "surplus in the buffer", all_right: "all right", all_wrong: "all wrong", no_signal: "no signal", stale: "stale", dropped: "dropped", expired: "expired" };
  const $ = (id) => document.getElementById(id);

  function make(kind, name, text) {
    const element = document.createElement(kind);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Data --------------------------------------------------------------------------------------------------------

  async function unpack(id) {
    const text = $(id).textContent;
    let bytes;
    if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(text);
    else {
      const raw = atob(text);
      bytes = new Uint8Array(raw.length);
      for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
    }
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).arrayBuffer();
  }
  const json = async (id) => JSON.parse(new TextDecoder().decode(await unpack(id)));

  const [meta, rows, texts, prompts] = await Promise.all(["meta", "rows", "texts", "prompts"].map(json));
  const steps = meta.steps, count = texts.length;
  const lengths = Int32Array.from(rows.rows || []), stepOf = Int32Array.from(rows.step || []);
  const offsets = new Int32Array(count);
  const totals = steps.map(() => 0);
  for (let i = 0; i < count; i++) { offsets[i] = totals[stepOf[i]]; totals[stepOf[i]] += lengths[i]; }
  const partNames = [...new Set(rows.parts.flatMap((part) => Object.keys(part)))].sort();
  const lowered = [];
  let pieces = null, chunks = new Map();

  /** The token arrays of a step: pieces, engine's log-probs, trainer's minus them, the last update's minus those. */
  async function chunk(step) {
    if (!pieces) pieces = await json("pieces");
    if (!chunks.has(step)) {
      const buffer = await unpack(`tokens-${step}`), n = totals[step];
      chunks.set(step, [new Uint32Array(buffer, 0, n), new Int16Array(buffer, 4 * n, n), new Int16Array(buffer, 6 * n, n), new Int16Array(buffer, 8 * n, n)]);
      if (chunks.size > 6) chunks.delete(chunks.keys().next().value);
    }
    return chunks.get(step);
  }

  const stepName = (step) => (step.kind === "evaluation" ? `evaluation ${step.step}` : `step ${step.step}`);
  const number = (value, digits = 3) => value === null || value === undefined ? "–" : Number(value.toFixed(digits)).toString();
  const verdictOf = (i) => (rows.correct[i] === null ? ["–", "unknown"] : rows.correct[i] ? ["✓", "yes"] : ["✗", "no"]);

  // Filters -----------------------------------------------------------------------------------------------------

  const matches = new Uint8Array(count).fill(1);
  let pattern = null;

  function choices(select, entries) {
    for (const [value, text] of entries) {
      const option = make("option", "", text);
      option.value = value;
      select.append(option);
    }
  }
  choices($("outcome"), [["kept", "kept"], ["not kept", "not kept"], ...OUTCOMES.filter((o) => rows.outcome.includes(o)).map((o) => [o, NAMES[o]])]);
  choices($("part"), [["reward", "reward"], ["advantage", "advantage"], ["gap", "engine–trainer"], ...partNames.map((name) => [`part ${name}`, name])]);
  choices($("order"), [["", "in order"], ["+length", "shortest first"], ["-length", "longest first"], ["-reward", "best reward"], ["+reward", "worst reward"], ["-advantage", "highest advantage"], ["+advantage", "lowest advantage"], ["-gap", "largest mismatch"]]);

  const value = (kind) => kind.startsWith("part ") ? (i) => rows.parts[i][kind.slice(5)] ?? null : (i) => rows[kind][i] ?? null;

  function readPattern() {
    const text = $("search").value;
    $("search").setCustomValidity("");
    if (!text) return null;
    const written = /^\/(.+)\/$/.exec(text);
    if (!written) return { text: text.toLowerCase() };
    try { return { expression: new RegExp(written[1], "i") }; } catch (error) {
      $("search").setCustomValidity(String(error.message));
      return { expression: /$^/ };
    }
  }

  function bound(id) {
    const text = $(id).value;
    return text === "" ? null : Number(text);
  }

  /** Prepare texts for searching while `mayGoOn` says so. */
  function lower(mayGoOn) {
    while (lowered.length < count && mayGoOn()) lowered.push(texts[lowered.length].toLowerCase());
  }
  function lowerWhenIdle(deadline) {
    lower(() => deadline.timeRemaining() > 1);
    if (lowered.length < count) requestIdleCallback(lowerWhenIdle);
  }

  function applyFilters() {
    const started = performance.now();
    const correct = $("correct").value, finish = $("finish").value, outcome = $("outcome").value;
    const low = bound("low") ?? 0, high = bound("high") ?? Infinity, least = bound("least"), most = bound("most");
    const part = value($("part").value), wanted = correct === "" ? undefined : JSON.parse(correct);
    pattern = readPattern();
    if (pattern && pattern.text) lower(() => true);
    const ofPrompt = pattern && prompts.map((p) => pattern.text ? (p.lowered ??= p.text.toLowerCase()).includes(pattern.text) : pattern.expression.test(p.text));
    let shown = 0;
    for (let i = 0; i < count; i++) {
      let ok = rows.length[i] >= low && rows.length[i] <= high;
      if (ok && wanted !== undefined) ok = rows.correct[i] === wanted;
      if (ok && finish) ok = rows.finish_reason[i] === finish;
      if (ok && outcome) {
        const kept = rows.outcome[i] === "trained" || rows.outcome[i] === "surplus";
        ok = outcome === "kept" ? kept : outcome === "not kept" ? rows.outcome[i] !== null && !kept : rows.outcome[i] === outcome;
      }
      if (ok && (least !== null || most !== null)) {
        const found = part(i);
        ok = found !== null && (least === null || found >= least) && (most === null || found <= most);
      }
      if (ok && pattern) ok = ofPrompt[rows.prompt[i]] || (pattern.text ? lowered[i].includes(pattern.text) : pattern.expression.test(texts[i]));
      matches[i] = ok ? 1 : 0;
      shown += matches[i];
    }
    for (const id of ["search", "correct", "finish", "outcome", "low", "high", "least", "most", "order"]) $(id).classList.toggle("active", $(id).value !== "");
    $("shown").textContent = shown === count ? "" : `${shown.toLocaleString()} shown`;
    for (const pane of isBoth ? panes : panes.slice(0, 1)) pane.refresh();
    const seconds = performance.now() - started;
    document.body.dataset.filterMs = seconds.toFixed(1);
    document.body.dataset.shown = shown;
  }

  // One list of responses with a reader ----------------------------------------------------------------------------

  class Pane {
    constructor(root, name) {
      this.root = root;
      this.name = name;
      this.step = -1;
      this.chosen = -1;
      this.items = [];
      this.side = make("div", "side");
      this.account = make("div", "account");
      this.list = make("div", "list");
      this.list.tabIndex = 0;
      this.inside = make("div", "items");
      this.list.append(this.inside);
      this.side.append(this.account, this.list);
      this.reader = make("div", "reader");
      this.reader.tabIndex = -1;
      root.append(this.side, this.reader);
      this.list.addEventListener("scroll", () => this.draw(), { passive: true });
      this.list.addEventListener("click", (event) => {
        const item = event.target.closest(".item");
        if (item && item.dataset.row !== undefined) this.choose(Number(item.dataset.row));
      });
      root.addEventListener("pointerdown", () => use(this), true);
      new ResizeObserver(() => this.draw()).observe(this.list);
    }

    /** Show a step; -1: all. */
    show(step) {
      this.step = step;
      this.refresh();
      this.list.scrollTop = 0;
      this.draw();
    }

    refresh() {
      // Lines of the list: a response's row, or ~row for the head of the group that begins there.
      const rowsHere = [], order = $("order").value;
      for (let i = 0; i < count; i++) if (matches[i] && (this.step < 0 || stepOf[i] === this.step)) rowsHere.push(i);
      if (order) {
        const of = value(order.slice(1)), sign = order[0] === "-" ? -1 : 1;
        const keys = new Float64Array(count);
        for (const i of rowsHere) keys[i] = of(i) === null ? Infinity : sign * of(i);
        this.items = rowsHere.slice().sort((a, b) => (keys[a] === keys[b] ? a - b : keys[a] - keys[b]));
      } else {
        this.items = [];
        let group = null;
        for (const i of rowsHere) {
          if (rows.group[i] !== group) this.items.push(~i);
          group = rows.group[i];
          this.items.push(i);
        }
      }
      this.inside.style.height = `${this.items.length * ROW}px`;
      this.drawAccount(rowsHere);
      const isThere = this.chosen >= 0 && matches[this.chosen] && (this.step < 0 || stepOf[this.chosen] === this.step);
      if (!isThere && rowsHere.length && !this.root.hidden) this.choose(this.items.find((item) => item >= 0), false);
      if (!rowsHere.length) { this.chosen = -1; this.reader.replaceChildren(make("p", "empty", count ? "No response is like that." : "The run has written no samples.")); }
      this.draw();
    }

    draw() {
      const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 8);
      const last = Math.min(this.items.length, first + Math.ceil(this.list.clientHeight / ROW) + 16);
      const drawn = [];
      for (let k = first; k < last; k++) {
        const item = this.items[k], element = item < 0 ? this.head(~item) : this.line(item);
        element.style.top = `${k * ROW}px`;
        drawn.push(element);
      }
      this.inside.replaceChildren(...drawn);
    }

    head(i) {
      const element = make("div", "item head"), prompt = prompts[rows.prompt[i]], outcome = rows.outcome[i];
      if (outcome) {
        const dot = make("span", "dot");
        dot.style.background = `var(--${outcome})`;
        dot.title = NAMES[outcome];
        element.append(dot);
      }
      if (this.step < 0) element.append(make("span", "", stepName(steps[stepOf[i]])));
      const text = make("span", "snippet", prompt.text.slice(-160).replace(/\s+/g, " "));
      text.title = prompt.text.slice(-1500);
      element.append(text, make("span", "", outcome ? NAMES[outcome] : `#${prompt.index}`));
      return element;
    }

    line(i) {
      const element = make("div", "item"), [sign, kind] = verdictOf(i);
      element.dataset.row = i;
      if (i === this.chosen) element.classList.add("on");
      if (rows.finish_reason[i] === "length") { element.classList.add("cut"); element.title = "truncated"; }
      element.append(make("span", `verdict ${kind}`, rows.is_greedy[i] ? "★" : sign));
      element.append(make("span", "number", number(rows.reward[i], 2)), make("span", "small", rows.length[i]));
      const snippet = make("span", "snippet");
      snippet.append(...marked(excerpt(texts[i])));
      element.append(snippet);
      return element;
    }

    drawAccount(rowsHere) {
      const pick = make("select", "pick");
      pick.setAttribute("aria-label", "Step");
      choices(pick, [[-1, "all steps"], ...steps.map((step, k) => [k, stepName(step)])]);
      pick.value = this.step;
      pick.addEventListener("change", () => { this.show(Number(pick.value)); drawSteps(); });
      const step = steps[this.step], parts = [pick];
      let right = 0, judged = 0;
      for (const i of rowsHere) if (rows.correct[i] !== null) { judged++; if (rows.correct[i]) right++; }
      const brief = `${rowsHere.length.toLocaleString()} responses` + (judged ? `, ${Math.round(100 * right / judged)} % right` : "");
      parts.push(make("span", "faint", ` ${brief} `));
      if (step && step.groups) {
        const line = make("div", "faint", "groups: ");
        for (const outcome of OUTCOMES.filter((o) => step.groups[o])) {
          const button = make("button", "went"), dot = make("span", "dot");
          dot.style.background = `var(--${outcome})`;
          button.append(dot, `${step.groups[outcome]} ${NAMES[outcome]}`);
          button.addEventListener("click", () => { $("outcome").value = $("outcome").value === outcome ? "" : outcome; applyFilters(); });
          line.append(button, " ");
        }
        const rest = [];
        if (!step.all_recorded) rest.push(`${step.recorded_groups} of them written`);
        if (step.in_buffer) rest.push(`${step.in_buffer} held after the step`);
        if (step.in_flight) rest.push(`${step.in_flight} in flight`);
        if (rest.length) line.append(`(${rest.join(", ")})`);
        parts.push(line);
      }
      this.account.replaceChildren(...parts);
    }

    choose(i, follow = true) {
      this.chosen = i;
      this.draw();
      this.read(i);
      if (follow && isBoth) {
        const other = panes.find((pane) => pane !== this), prompt = rows.prompt[i];
        const same = other.items.filter((item) => item >= 0 && rows.prompt[item] === prompt);
        const own = this.items.filter((item) => item >= 0 && rows.prompt[item] === prompt).indexOf(i);
        if (same.length) { other.chosen = same[Math.min(own, same.length - 1)]; other.reveal(); other.read(other.chosen); }
      }
    }

    reveal() {
      const k = this.items.indexOf(this.chosen), top = k * ROW;
      if (top < this.list.scrollTop + ROW) this.list.scrollTop = Math.max(0, top - 2 * ROW);
      else if (top > this.list.scrollTop + this.list.clientHeight - 2 * ROW) this.list.scrollTop = top - this.list.clientHeight + 3 * ROW;
      this.draw();
    }

    /** Move by responses, or with `byGroup` to the next group's first. */
    move(direction, byGroup) {
      let k = this.items.indexOf(this.chosen);
      const group = rows.group[this.chosen];
      do { k += direction; } while (k >= 0 && k < this.items.length && (this.items[k] < 0 || (byGroup && rows.group[this.items[k]] === group)));
      if (k < 0 || k >= this.items.length) return;
      if (byGroup && direction < 0) while (k > 0 && this.items[k - 1] >= 0 && rows.group[this.items[k - 1]] === rows.group[this.items[k]]) k--;
      this.choose(this.items[k]);
      this.reveal();
    }

    async read(i) {
      const tokens = await chunk(stepOf[i]);
      if (this.chosen !== i) return;
      const prompt = prompts[rows.prompt[i]];
      const top = make("div", "top"), bar = make("div", "inner"), strip = make("canvas", "strip");
      bar.append(modeButtons(), legend(i));
      const under = make("div", "inner");
      under.append(strip);
      top.append(bar, under);
      const inner = make("div", "inner");
      const promptText = make("div", "prompt");
      promptText.append(...marked(prompt.text));
      const response = make("div", "response");
      const name = rows.blocks[i] ? "Turns" : "Response";
      inner.append(facts(i), make("h2", "", "Prompt"), promptText, make("h2", "", name), response);
      response.dataset.row = i;
      if (rows.blocks[i]) fillTurns(response, i, tokens);
      else fillTokens(response, i, tokens, 0, { end: lengths[i], finish_reason: rows.finish_reason[i] }, texts[i]);
      this.reader.replaceChildren(top, inner);
      this.reader.scrollTop = 0;
      drawStrip(strip, i, tokens);
      strip.addEventListener("click", (event) => {
        const token = response.querySelector(`[data-t="${Math.min(lengths[i] - 1, Math.floor(lengths[i] * event.offsetX / strip.clientWidth))}"]`);
        if (token) token.scrollIntoView({ block: "center" });
      });
      document.body.dataset.reading = i;
    }
  }

  function facts(i) {
    const list = make("dl", "facts"), [sign, kind] = verdictOf(i);
    const add = (name, text, style) => {
      if (text === null || text === undefined || text === "") return;
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd", style || "", text));
      list.append(pair);
    };
    add("verdict", rows.correct[i] === null ? "none" : rows.correct[i] ? "✓ correct" : "✗ wrong", `big ${kind}`);
    add("reward", number(rows.reward[i], 4), "big");
    add("advantage", rows.advantage[i] === null ? null : number(rows.advantage[i], 4), "big");
    for (const [name, part] of Object.entries(rows.parts[i])) add(name, number(part, 4));
    if (rows.accuracy_reward[i] !== rows.reward[i]) add("before shaping", number(rows.accuracy_reward[i], 4));
    add("answer", rows.answer[i]);
    add("ground truth", prompts[rows.prompt[i]].truth);
    if (rows.blocks[i]) add("turns", rows.blocks[i].filter((block) => block.kind === "turn").length);
    add("length", `${rows.length[i]}${rows.finish_reason[i] === "length" ? ", truncated" : ""}`);
    add("in", stepName(steps[stepOf[i]]));
    add("group", rows.outcome[i] && NAMES[rows.outcome[i]]);
    if (rows.in_loss[i] === false) add("loss", "left out");
    if (rows.is_greedy[i]) add("sampled", "greedily, as a baseline");
    add("weights", rows.versions[i].map(([version]) => version).join(" → "));
    add("engine", [...new Set(rows.engines[i])].filter(Boolean).join(", "));
    for (const name of Object.keys(rows)) if (name.startsWith("more ")) add(name.slice(5), rows[name][i]);
    add("prompt", `#${prompts[rows.prompt[i]].index}`);
    if (rows.gap[i] !== null) add("largest engine–trainer difference", number(rows.gap[i], 5));
    return list;
  }

  // Tokens ------------------------------------------------------------------------------------------------------

  const MODES = [["text", "Text"], ["probability", "Probability"], ["difference", "Engine–trainer"], ["ratio", "Ratio, clipping"], ["weights", "Weights"]];
  let mode = "probability";
  const PROBABILITY = [0.9, 0.7, 0.45, 0.2, 0.05, 0.01], DIFFERENCE = [0.005, 0.02, 0.05, 0.1, 0.25, 0.5], RATIO = [0.01, 0.03, 0.07, 0.13, 0.2, 0.3];
  const above = (bounds, size) => bounds.reduce((level, bound) => level + (size >= bound), 0);

  /** The values of token t of response i, each null where it is not known. */
  function valuesOf(i, t, [, engine, difference, change]) {
    const k = offsets[i] + t, of = (array, scale) => (array[k] === ABSENT ? null : array[k] / scale);
    const gap = of(difference, 10000), moved = of(change, 10000);
    const ratio = moved === null ? null : Math.exp(moved + (meta.clip && meta.clip.of_engine ? gap : 0));
    let clipped = "";
    if (ratio !== null && meta.clip && rows.advantage[i] !== null) {
      if (rows.advantage[i] > 0 && ratio > 1 + meta.clip.high) clipped = "clipped above";
      if (rows.advantage[i] < 0 && ratio < 1 - meta.clip.low) clipped = "clipped below";
    }
    return { engine: of(engine, 1000), gap, ratio, clipped };
  }

  function versionOf(i, t) {
    const spans = rows.versions[i];
    for (let k = 0; k < spans.length; k++) if (t < spans[k][1]) return [spans[k][0], k];
    return [rows.weight_version[i], 0];
  }

  function styleOf(i, t, tokens) {
    if (mode === "text") return "";
    const { engine, gap, ratio, clipped } = valuesOf(i, t, tokens);
    if (engine === null) return "";
    if (mode === "weights") return `v${versionOf(i, t)[0] % 6}`;
    if (mode === "probability") {
      const p = Math.exp(engine), level = PROBABILITY.reduce((found, b) => found + (p < b), 0);
      return level ? `h${level}` : "";
    }
    const size = mode === "difference" ? gap : ratio === null ? null : Math.log(ratio);
    if (size === null) return "";
    const level = above(mode === "difference" ? DIFFERENCE : RATIO, Math.abs(size));
    return (level ? (size > 0 ? `c${level}` : `h${level}`) : "") + (mode === "ratio" && clipped ? " clip" : "");
  }

  /** What the policy wrote in each turn of response i, what it observed between them, and how it ended. */
  function fillTurns(response, i, tokens) {
    let start = 0, turn = 0;
    const names = { observed: "Observed", rewritten: "History rewritten: a new piece begins" };
    for (const block of rows.blocks[i]) {
      const head = make("h3", "", block.kind === "turn" ? `Turn ${++turn}` : `${names[block.kind]} · not sampled`);
      const text = make("div", `block ${block.kind}`);
      if (block.kind === "turn") {
        const parts = Object.entries(block.parts).map(([name, part]) => `${name} ${number(part, 4)}`);
        head.append(make("span", "faint", [block.finish_reason === "length" ? "cut off" : block.finish_reason, ...parts].join(" · ")));
      }
      response.append(head);
      for (const call of block.calls || []) {
        const line = make("div", "call", `${call.name ?? "call"} `);
        line.append(call.problem ? make("span", "no", call.problem) : JSON.stringify(call.arguments));
        response.append(line);
      }
      response.append(text);
      const numbers = tokens[0].subarray(offsets[i] + start, offsets[i] + block.end);
      fillTokens(text, i, tokens, start, block, Array.from(numbers, (k) => pieces[k]).join(""));
      start = block.end;
    }
    const stop = rows["more stop"] && rows["more stop"][i];
    if (stop) response.append(make("p", "faint", `Ended: ${stop}${meta.stops[stop] ? `, ${meta.stops[stop]}` : ""}`));
  }

  /** Tokens of response i from `start` to the block's end, whose text is `whole`. */
  function fillTokens(response, i, tokens, start, block, whole) {
    const parts = document.createDocumentFragment(), numbers = tokens[0];
    const found = pattern ? hits(whole) : [];
    let place = 0;
    for (let t = start; t < block.end; t++) {
      const piece = pieces[numbers[offsets[i] + t]], element = make("u", styleOf(i, t, tokens));
      element.dataset.t = t;
      if (piece === "") element.classList.add("void");
      if (piece.startsWith("\n")) element.classList.add("line");
      const isSpecial = t === block.end - 1 && block.finish_reason === "stop" && (block.kind || !whole.startsWith(piece, place));
      if (isSpecial) element.classList.add("end");
      if (found.some(([from, to]) => place < to && place + piece.length > from)) element.append(make("mark", "", piece));
      else element.textContent = piece;
      place += piece.length;
      parts.append(element);
    }
    response.append(parts);
  }

  function recolour() {
    for (const pane of panes) {
      if (pane.chosen < 0) continue;
      const i = pane.chosen;
      chunk(stepOf[i]).then((tokens) => {
        const response = pane.reader.querySelector(".response");
        if (!response || Number(response.dataset.row) !== i) return;
        for (const element of response.querySelectorAll("u")) {
          const keep = ["void", "line", "end"].filter((name) => element.classList.contains(name));
          element.className = [styleOf(i, Number(element.dataset.t), tokens), ...keep].join(" ");
        }
        pane.reader.querySelector(".modes").replaceWith(modeButtons());
        pane.reader.querySelector(".legend").replaceWith(legend(i));
        drawStrip(pane.reader.querySelector(".strip"), i, tokens);
      });
    }
  }

  function modeButtons() {
    const group = make("span", "modes");
    for (const [name, text] of MODES) {
      const button = make("button", "", text);
      button.setAttribute("aria-pressed", String(name === mode));
      button.addEventListener("click", () => { mode = name; recolour(); });
      group.append(button);
    }
    return group;
  }

  function legend(i) {
    const line = make("span", "legend"), swatch = (name) => line.append(make("i", name));
    if (mode === "probability") { line.append("likely"); for (let k = 1; k <= 6; k++) swatch(`h${k}`); line.append("below 1 %"); }
    if (mode === "difference" || mode === "ratio") {
      line.append(mode === "difference" ? "trainer thinks less likely" : "made less likely");
      for (let k = 6; k; k--) swatch(`h${k}`);
      for (let k = 1; k <= 6; k++) swatch(`c${k}`);
      line.append("more likely");
      if (mode === "ratio") line.append(meta.clip ? "· underlined: clipped" : "");
      const known = rows.advantage[i] !== null;
      if (!known) line.append("(not trained on)");
    }
    if (mode === "weights") for (const [version] of rows.versions[i]) { swatch(`v${version % 6}`); line.append(`weights ${version}`); }
    return line;
  }

  /** All tokens of the response as one line of colours. */
  function drawStrip(canvas, i, tokens) {
    const width = canvas.clientWidth || 600, n = lengths[i], probe = make("i");
    canvas.width = width;
    canvas.height = 9;
    const context = canvas.getContext("2d"), colours = new Map();
    document.body.append(probe);
    for (let x = 0; x < width; x++) {
      const style = styleOf(i, Math.min(n - 1, Math.floor(x * n / width)), tokens).split(" ")[0];
      if (!colours.has(style)) { probe.className = style; colours.set(style, style ? getComputedStyle(probe).backgroundColor : getComputedStyle(document.documentElement).getPropertyValue("--panel")); }
      context.fillStyle = colours.get(style);
      context.fillRect(x, 0, 1, 9);
    }
    probe.remove();
  }

  const tip = $("tip");
  document.addEventListener("mouseover", async (event) => {
    const element = event.target.closest ? event.target.closest(".response u") : null;
    if (!element) { tip.hidden = true; return; }
    const i = Number(element.closest(".response").dataset.row), t = Number(element.dataset.t), tokens = await chunk(stepOf[i]);
    const { engine, gap, ratio, clipped } = valuesOf(i, t, tokens), table = make("table");
    const add = (name, text) => {
      const row = make("tr");
      row.append(make("td", "", name), make("td", "", text));
      table.append(row);
    };
    const percent = (p) => `${(100 * p).toPrecision(3)} %`;
    add("token", `${t + 1} of ${lengths[i]}`);
    if (engine !== null) add("engine", `${percent(Math.exp(engine))}  (${engine.toFixed(3)})`);
    if (gap !== null) { add("trainer", `${percent(Math.exp(engine + gap))}  (${(engine + gap).toFixed(3)})`); add("trainer − engine", gap.toFixed(4)); }
    if (ratio !== null) add("ratio in the update", `${ratio.toFixed(4)} ${clipped}`);
    if (engine === null) add("observed", "not sampled");
    else add("weights", versionOf(i, t)[0]);
    tip.replaceChildren(make("b", "", JSON.stringify(pieces[tokens[0][offsets[i] + t]])), table);
    tip.hidden = false;
    const box = element.getBoundingClientRect(), own = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(6, Math.min(box.left, innerWidth - own.width - 8))}px`;
    tip.style.top = `${box.bottom + own.height + 12 < innerHeight ? box.bottom + 6 : box.top - own.height - 6}px`;
  });

  // Found text --------------------------------------------------------------------------------------------------

  /** Where the search's text stands: [from, to] in characters, at most a hundred. */
  function hits(text) {
    const found = [];
    if (pattern.text) {
      const lower = text.toLowerCase();
      for (let at = lower.indexOf(pattern.text); at >= 0 && found.length < 100; at = lower.indexOf(pattern.text, at + 1)) found.push([at, at + pattern.text.length]);
    } else {
      for (const match of text.matchAll(new RegExp(pattern.expression, "gi"))) {
        if (match[0]) found.push([match.index, match.index + match[0].length]);
        if (found.length >= 100) break;
      }
    }
    return found;
  }

  function excerpt(text) {
    let from = 0;
    if (pattern) { const [first] = hits(text); if (first) from = Math.max(0, first[0] - 12); }
    return (from ? "…" : "") + text.slice(from, from + 220).replace(/\s+/g, " ");
  }

  function marked(text) {
    if (!pattern) return [document.createTextNode(text)];
    const parts = [];
    let place = 0;
    for (const [from, to] of hits(text)) {
      if (from < place) continue;
      parts.push(document.createTextNode(text.slice(place, from)), make("mark", "", text.slice(from, to)));
      place = to;
    }
    parts.push(document.createTextNode(text.slice(place)));
    return parts;
  }

  // Steps, sides, keys --------------------------------------------------------------------------------------------

  const panes = [new Pane($("pane-a"), "a"), new Pane($("pane-b"), "b")];
  let current = panes[0], isBoth = false;
  const use = (pane) => { if (current !== pane) { current = pane; drawSteps(); } };

  const accuracy = steps.map(() => [0, 0]);
  for (let i = 0; i < count; i++) if (rows.correct[i] !== null && !rows.is_greedy[i]) { accuracy[stepOf[i]][1]++; if (rows.correct[i]) accuracy[stepOf[i]][0]++; }

  function drawSteps() {
    const buttons = [];
    const add = (k, name, side, shares) => {
      const button = make("button", "step");
      button.append(make("b", "", name), make("span", "", side));
      if (shares) {
        const bar = make("div", "share");
        for (const [colour, size, title] of shares) {
          const part = make("i");
          part.style.width = `${size}%`;
          part.style.background = `var(--${colour})`;
          part.title = title;
          bar.append(part);
        }
        button.append(bar);
      }
      if (k === current.step) button.classList.add("on");
      else if (isBoth && panes.some((pane) => pane.step === k)) button.classList.add("other");
      button.addEventListener("click", () => { current.show(k); drawSteps(); });
      buttons.push(button);
    };
    add(-1, "all", count.toLocaleString());
    steps.forEach((step, k) => {
      const [right, judged] = accuracy[k], share = judged ? `${Math.round(100 * right / judged)} %` : "";
      if (step.kind === "evaluation") return add(k, stepName(step), share, judged ? [["right", 100 * right / judged, "right"], ["wrong", 100 - 100 * right / judged, "wrong"]] : null);
      const groups = Object.entries(step.groups || {}), all = groups.reduce((sum, [, n]) => sum + n, 0);
      groups.sort(([a], [b]) => OUTCOMES.indexOf(a) - OUTCOMES.indexOf(b));
      return add(k, stepName(step), share, all ? groups.map(([outcome, n]) => [outcome, 100 * n / all, `${n} ${NAMES[outcome]}`]) : null);
    });
    const at = $("steps").scrollTop;
    $("steps").replaceChildren(...buttons);
    $("steps").scrollTop = at;
    const on = $("steps").querySelector(".on");
    if (on) on.scrollIntoView({ block: "nearest" });
  }

  function compare(both) {
    isBoth = both;
    $("pane-b").hidden = !both;
    $("main").classList.toggle("both", both);
    $("compare").setAttribute("aria-pressed", String(both));
    if (both) {
      const kind = steps[Math.max(panes[0].step, 0)].kind, same = steps.map((step, k) => k).filter((k) => steps[k].kind === kind);
      if (panes[0].step < 0) panes[0].show(same[0]);
      const others = same.filter((k) => k !== panes[0].step);
      panes[1].show(others.length ? others[others.length - 1] : panes[0].step);
      panes[0].choose(panes[0].chosen);
    } else use(panes[0]);
    drawSteps();
  }

  function theme(name) {
    document.documentElement.dataset.theme = name;
    try { localStorage.setItem("theme", name); } catch { /* a page opened from a file may have no storage */ }
    recolour();
  }
  const turn = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

  function clear() {
    for (const id of ["search", "correct", "finish", "outcome", "low", "high", "least", "most", "order"]) $(id).value = "";
    applyFilters();
  }

  function stepBy(direction) {
    const next = current.step + direction;
    if (next >= -1 && next < steps.length) { current.show(next); drawSteps(); }
  }

  for (const id of ["search", "low", "high", "least", "most"]) $(id).addEventListener("input", applyFilters);
  for (const id of ["correct", "finish", "outcome", "part", "order"]) $(id).addEventListener("change", applyFilters);
  $("clear").addEventListener("click", clear);
  $("compare").addEventListener("click", () => compare(!isBoth));
  $("theme").addEventListener("click", turn);
  $("help").addEventListener("click", () => $("keys").showModal());
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select");
    if (event.key === "Escape") { event.target.blur(); clear(); return; }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || $("keys").open) return;
    const actions = {
      j: () => current.move(1), k: () => current.move(-1), ArrowDown: () => current.move(1), ArrowUp: () => current.move(-1),
      n: () => current.move(1, true), p: () => current.move(-1, true), "]": () => stepBy(1), "[": () => stepBy(-1),
      c: () => steps.length && compare(!isBoth), t: turn, "/": () => $("search").focus(), "?": () => $("keys").showModal(),
      ...(isBoth ? { Tab: () => use(panes.find((pane) => pane !== current)) } : {}),
    };
    const at = "12345".indexOf(event.key);
    if (at >= 0 && event.key) { mode = MODES[at][0]; recolour(); }
    else if (actions[event.key]) { event.preventDefault(); actions[event.key](); }
  });

  let stored = null;
  try { stored = localStorage.getItem("theme"); } catch { /* as above */ }
  document.documentElement.dataset.theme = stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("name").textContent = meta.name;
  $("total").textContent = `${count.toLocaleString()} responses${meta.notes.length ? ` · ${meta.notes.join(" · ")}` : ""}`;
  panes[0].step = steps.length ? steps.length - 1 : -1;
  panes[1].step = panes[0].step;
  applyFilters();
  drawSteps();
  const address = new URLSearchParams(location.hash.slice(1));
  if (address.get("step") !== null) { panes[0].show(Number(address.get("step"))); drawSteps(); }
  if (address.get("mode")) { mode = address.get("mode"); recolour(); }
  if (address.get("theme")) theme(address.get("theme"));
  if (address.get("compare")) compare(true);
  document.body.dataset.ready = (performance.now()).toFixed(1);
  if (window.requestIdleCallback) requestIdleCallback(lowerWhenIdle);
})().catch((error) => {
  const note = document.createElement("p");
  note.className = "empty";
  note.textContent = `The page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`;
  document.body.prepend(note);
  document.body.dataset.failed = error.message;
});
