// sphinx-copybutton knows seven languages, and Korean is not among them; its messages are global.
if (document.documentElement.lang === "ko" && typeof messages !== "undefined") {
  messages.ko = {
    copy: "복사",
    copy_to_clipboard: "복사",
    copy_success: "복사했습니다",
    copy_failure: "복사하지 못했습니다",
  };
  locale = "ko";
}
