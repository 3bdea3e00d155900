/** The webcam. */

/** Why this page may not use a webcam; empty where it may ask for one. */
export function cameraObstacle() {
  if (navigator.mediaDevices?.getUserMedia) return "";
  return window.isSecureContext
    ? "This browser has no webcam for pages."
    : "Browsers give the webcam only to pages of localhost or of https.";
}

/** The webcam's picture in a `<video>`. */
export class Camera {
  #video;
  #stream = null;

  constructor(video) {
    this.#video = video;
  }

  get on() {
    return this.#stream !== null;
  }

  /** Asks for the webcam. Rejects where there is none, or nobody allows it. */
  async start() {
    const stream = await navigator.mediaDevices.getUserMedia({ video: true });
    this.stop(); // one that was asked for twice would stay on
    this.#stream = this.#video.srcObject = stream;
    await this.#video.play(); // from here on there is a frame
  }

  stop() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#stream = this.#video.srcObject = null;
  }

  /** The current frame as a data URL. */
  takeFrame() {
    const canvas = document.createElement("canvas");
    canvas.width = this.#video.videoWidth;
    canvas.height = this.#video.videoHeight;
    canvas.getContext("2d").drawImage(this.#video, 0, 0);
    return canvas.toDataURL("image/jpeg", 0.92);
  }
}
