// Import this before uPlot, which fails where the browser's language is no valid tag ("en-US@posix").

try {
  new Intl.NumberFormat(navigator.language);
} catch {
  Object.defineProperty(navigator, "language", { value: "en" });
}
