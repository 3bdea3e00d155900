/** The page: a picture, a question, and the answer beside plain decoding. */

import { compareAnswers, showAnswer, showFigures } from "./answer.js";
import { Camera, cameraObstacle } from "./camera.js";
import { Refusal, fetchModelName, streamEvents } from "./stream.js";

const page = Object.fromEntries([...document.querySelectorAll("[id]")].map((element) => [element.id, element]));
const camera = new Camera(page.video);
let picture = ""; // a data URL
let model; // its name, once it is known
let running = null; // what stops the request that is asked

// --- what is asked about ---

function showSource() {
  page.video.hidden = !camera.on;
  page.picture.hidden = camera.on || !picture;
  page.hint.hidden = camera.on || Boolean(picture);
  page.remove.hidden = page.picture.hidden;
  page["every-field"].hidden = !camera.on;
  page.webcam.setAttribute("aria-pressed", String(camera.on));
}

function usePicture(url) {
  camera.stop();
  picture = url;
  page.picture.src = url || "data:,";
  page.file.value = ""; // so that the same file can be chosen again
  showSource();
}

function readPicture(file) {
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => usePicture(reader.result);
  reader.onerror = () => showError(`${file.name}: ${reader.error.message}`);
  reader.readAsDataURL(file);
}

async function toggleCamera() {
  page["camera-note"].textContent = "";
  if (camera.on) {
    camera.stop();
  } else {
    page.video.hidden = false; // some browsers play no hidden video
    await camera.start().catch((error) => {
      page["camera-note"].textContent = `No webcam: ${error.message}.`;
    });
  }
  showSource();
}

// --- requests ---

function readForm() {
  const number = (element) => (Number.isNaN(element.valueAsNumber) ? undefined : element.valueAsNumber);
  const url = camera.on ? camera.takeFrame() : picture;
  const content = [];
  if (url) content.push({ type: "image_url", image_url: { url } });
  if (page.question.value) content.push({ type: "text", text: page.question.value });
  page.frame.hidden = !camera.on;
  if (camera.on) page.frame.src = url;
  return {
    model,
    messages: [{ role: "user", content }],
    temperature: number(page.temperature),
    max_tokens: number(page["max-tokens"]),
    seed: number(page.seed) ?? Math.floor(Math.random() * 2 ** 32), // one for both requests
    stream: true,
    stream_options: { include_usage: true },
    logprobs: true,
    top_logprobs: 0,
  };
}

async function askOnce(signal) {
  const request = readForm();
  const compare = page.compare.checked;
  page.status.textContent = "Decoding with a draft …";
  const drafted = await showAnswer(page.drafted, streamEvents(request, page.key.value, signal));
  showFigures(page.figures, [drafted.figures, null]);
  if (!compare) return;
  page.status.textContent = "Decoding plainly …";
  const plainly = streamEvents({ ...request, draft: "none" }, page.key.value, signal);
  const plain = await showAnswer(page.plain, plainly);
  showFigures(page.figures, [drafted.figures, plain.figures]);
  page.verdict.textContent = compareAnswers(drafted, plain, request.temperature);
}

async function ask() {
  if (running) return;
  running = new AbortController();
  const { signal } = running;
  setRunning(true);
  clearAnswers();
  try {
    do {
      await askOnce(signal);
      await new Promise(requestAnimationFrame); // none comes while the page is in the background
    } while (camera.on && page.every.checked && !signal.aborted);
    page.status.textContent = signal.aborted ? "Stopped." : "Done.";
  } catch (error) {
    page.status.textContent = error.name === "AbortError" ? "Stopped." : "";
    if (error.name !== "AbortError") showError(error);
  } finally {
    running = null;
    setRunning(false);
  }
}

function clearAnswers() {
  for (const element of [page.drafted, page.plain, page.verdict, page.error]) element.replaceChildren();
  showFigures(page.figures, [null, null]);
}

function setRunning(yes) {
  page.ask.disabled = yes;
  page.stop.disabled = !yes;
}

function showError(error) {
  page.error.textContent = error.message ?? error;
  if (error instanceof Refusal && error.status === 401) {
    page["key-field"].hidden = false;
    page.key.focus();
  }
}

async function showModel() {
  try {
    model = await fetchModelName(page.key.value);
    page.model.textContent = document.title = model;
    showError("");
  } catch (error) {
    showError(error);
  }
}

// --- events ---

function listen() {
  page.form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  page.question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) page.form.requestSubmit();
  });
  page.stop.addEventListener("click", () => running?.abort());
  page.file.addEventListener("change", () => readPicture(page.file.files[0]));
  page.remove.addEventListener("click", () => usePicture(""));
  page.webcam.addEventListener("click", toggleCamera);
  page.key.addEventListener("change", showModel);
  page.compare.addEventListener("change", showPlain);
  // The whole page takes a picture: one that misses the frame would else replace the page.
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    page.drop.classList.add("over");
  });
  document.addEventListener("dragleave", () => page.drop.classList.remove("over"));
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    page.drop.classList.remove("over");
    readPicture(event.dataTransfer.files[0]);
  });
}

function showPlain() {
  document.body.classList.toggle("alone", !page.compare.checked);
}

function begin() {
  listen();
  showPlain(); // browsers keep what was checked when a page is loaded again
  showSource();
  showFigures(page.figures, [null, null]);
  page["camera-note"].textContent = cameraObstacle();
  page.webcam.disabled = Boolean(cameraObstacle());
  showModel();
}

begin();
