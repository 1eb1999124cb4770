/** Runs cases one after the other; a line of JSON tells of each what went wrong, null for nothing. */
export async function tell(cases) {
  for (const [name, run] of Object.entries(cases)) {
    let error = null;
    try {
      await run();
    } catch (raised) {
      error = String(raised.stack ?? raised).slice(0, 1500);
    }
    console.log(JSON.stringify({ case: name, error }));
  }
}
