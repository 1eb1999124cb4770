// Sets the chosen theme before anything is drawn; a plain script, since modules run too late.
"use strict";

try {
  const { theme } = JSON.parse(localStorage.getItem("luceasync.settings") ?? "{}");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Nothing is stored, or may be: the system's theme.
}
