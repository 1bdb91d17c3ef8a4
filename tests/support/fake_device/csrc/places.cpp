// Where in the user's Python a call was made.
//
// A launch notes it for each kernel, so it must be cheap: frames are walked once, and a code object is looked at once.
#include <Python.h>

#include "fake.h"

namespace fake {
namespace {

struct File {
  std::string name;
  bool is_below;
};
// Guarded by the GIL. Code objects are kept: their addresses are the keys.
std::unordered_map<PyCodeObject*, int32_t>& codes() {
  static auto* all = new std::unordered_map<PyCodeObject*, int32_t>();
  return *all;
}
std::mutex files_mutex;
std::vector<File>& files() {
  static auto* all = new std::vector<File>();
  return *all;
}

int32_t number_of(PyCodeObject* code) {
  auto found = codes().find(code);
  if (found != codes().end()) return found->second;
  const char* name = PyUnicode_AsUTF8(code->co_filename);
  const char* function = PyUnicode_AsUTF8(code->co_name);
  std::string path = name ? name : "?";
  bool is_below = path.find("/torch/") != std::string::npos || path.find("/fake_device/") != std::string::npos ||
      path.rfind("<", 0) == 0;
  // Frames of nxdpp between the model's function and torch.
  for (const char* between : {"/nxdpp/devices/host_answers.py", "/pipeline/stages/answered_call.py"})
    is_below |= path.find(between) != std::string::npos;
  std::lock_guard<std::mutex> lock(files_mutex);
  files().push_back({path + " in " + (function ? function : "?"), is_below});
  Py_INCREF(code);
  int32_t number = static_cast<int32_t>(files().size()) - 1;
  codes().emplace(code, number);
  return number;
}

bool can_ask() {
  return Py_IsInitialized() && !runtime().stopping;
}

}  // namespace

Place here(const char* call, bool takes_gil) {
  Place place{-1, 0, call};
  if (!can_ask() || (!takes_gil && !PyGILState_Check())) return place;
  PyGILState_STATE state = PyGILState_Ensure();
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    int32_t number = number_of(code);
    Py_DECREF(code);
    bool is_below;
    {
      std::lock_guard<std::mutex> lock(files_mutex);
      is_below = files()[number].is_below;
    }
    if (!is_below || place.file < 0) {
      place.file = number;
      place.line = PyFrame_GetLineNumber(frame);
    }
    PyFrameObject* back = is_below ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(state);
  return place;
}

std::string text(const Place& place) {
  std::string at;
  if (place.file < 0) {
    at = "a thread outside of Python, such as autograd's";
  } else {
    std::lock_guard<std::mutex> lock(files_mutex);
    const std::string& name = files()[place.file].name;
    size_t in = name.rfind(" in ");
    at = name.substr(0, in) + ":" + std::to_string(place.line) + name.substr(in);
  }
  return std::string(place.call) + " (" + at + ")";
}

WithoutGil::WithoutGil() : state_(nullptr) {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}

WithoutGil::~WithoutGil() {
  if (state_ != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

}  // namespace fake
