/* What this browser keeps of the page: in this tab until it is closed, or for all tabs. */

class Box {
  /* kind: sessionStorage or localStorage; a browser may refuse both, and either may be full. */
  constructor(kind) {
    try {
      this.storage = window[kind];
    } catch {
      this.storage = null;
    }
  }

  /* The value under a name; null where there is none. */
  get(name) {
    try {
      return JSON.parse(this.storage.getItem(`localspec.${name}`));
    } catch {
      return null; // nothing, or nothing of ours
    }
  }

  /* Keeps a value, null for none; false where it has not. */
  set(name, value) {
    try {
      if (value === null) this.storage.removeItem(`localspec.${name}`);
      else this.storage.setItem(`localspec.${name}`, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  }

  /* The names that begin so. */
  names(start) {
    try {
      const begin = `localspec.${start}`;
      return Object.keys(this.storage).filter((name) => name.startsWith(begin)).map((name) => name.slice("localspec.".length));
    } catch {
      return [];
    }
  }
}

export const thisTab = new Box("sessionStorage");
export const allTabs = new Box("localStorage");

/* What somebody has typed or set: what this tab had last, else any tab. */
export const typed = {
  get: (name) => thisTab.get(name) ?? allTabs.get(name),
  set(name, value) {
    const isMine = JSON.stringify(allTabs.get(name)) === JSON.stringify(thisTab.get(name));
    if (isMine || value?.text || value?.length) allTabs.set(name, value); // else another tab has typed something since
    thisTab.set(name, value);
  },
};

/* 16 random hexadecimal digits. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
